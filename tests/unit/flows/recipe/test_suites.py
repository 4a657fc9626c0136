"""Suites of a recipe: named, spelled out or read from a file; what they cannot be is one line."""

from pathlib import Path
from typing import Any

import pytest

from engines.config.sections import EvaluationConfig
from engines.config.stages.final import CompareStageConfig, EvaluateStageConfig
from engines.config.training import HardwareConfig
from flows.plan import Planner
from flows.recipe.recipe import Recipe, load_recipe, parse_recipe
from flows.recipe.source import SUITES_DIR, shipped_names, with_overrides
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.names import renamed_sections
from infra.store.storage import LocalStorage

KNOWN = HardwareConfig(platform="cpu", device_kind="x86_64")
ADDITION = "suites={addition: addition}"
NOTHING_TRAINS = {"sft": None, "rl": {"num_rounds": 0}}


def measured(*overrides: str) -> Recipe:
    """Of a model that is there and only measured."""
    data = {"name": "measured", "model": {"path": "owner/name"}, **NOTHING_TRAINS}
    return parse_recipe(with_overrides(data, overrides))


def planned(recipe: Recipe, root: Path) -> dict[str, Any]:
    recipe = recipe.model_copy(update={"hardware": KNOWN})
    planner = Planner(LocalStorage(root / "store"), recipe.seed, {})
    run_stages(recipe, planner, lambda _: None)
    return {stage.label: stage for stage in planner.stages}


@pytest.mark.parametrize("name", shipped_names(SUITES_DIR))
def test_every_shipped_suite_loads(name: str) -> None:
    suite = load_recipe("quickstart", [f"suites={{{name}: {name}}}"]).suites[name]
    assert suite.reward is not None
    assert suite.evaluation.max_new_tokens is not None


def test_suite_is_a_name_file_or_mapping_and_takes_overlays(
    tmp_path: Path,
) -> None:
    (tmp_path / "hard.yaml").write_text("extends: addition\ndata: {arithmetic: {num_digits: 4}}\n")
    recipe = load_recipe(
        "quickstart",
        [
            f"suites={{addition: addition, hard: {tmp_path}/hard.yaml}}",
            "suites.own={data: {arithmetic: {num_eval: 8}}, reward: {function: exact}}",
            "suites.hard.evaluation.num_problems=5",
        ],
    )
    assert [*recipe.suites] == ["addition", "hard", "own"]
    digits = [s.data.arithmetic.num_digits for s in recipe.suites.values() if s.data.arithmetic]
    assert digits == [2, 4, 2]
    assert recipe.suites["hard"].evaluation.num_problems == 5
    assert recipe.suites["hard"].evaluation.max_new_tokens == 6


def test_a_recipe_changes_a_part_of_a_suite_that_its_base_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\nsuites: {addition: addition}\n")
    (tmp_path / "above.yaml").write_text(
        "extends: base.yaml\nsuites: {addition: {evaluation: {num_problems: 5}}}\n"
    )
    suite = load_recipe(str(tmp_path / "above.yaml")).suites["addition"]
    assert (suite.evaluation.num_problems, suite.evaluation.max_new_tokens) == (5, 6)


def test_a_suite_s_own_confidence_is_that_of_its_comparison() -> None:
    recipe = load_recipe(
        "quickstart",
        [ADDITION, "suites.addition.evaluation.confidence=0.99", "against.path=owner/name"],
    )
    found = (
        CompareStageConfig.from_recipe(recipe, "addition").confidence,
        CompareStageConfig.from_recipe(recipe).confidence,
    )
    assert found == (0.99, 0.95)


def said(stage: EvaluateStageConfig, path: str) -> str:
    """What an error of its job about a field of a recipe names."""
    with pytest.raises(ConfigError) as found, renamed_sections(stage.sections):
        raise ConfigError(path, "got none")
    return found.value.path


def test_a_judge_is_the_recipe_s_wherever_it_is_asked() -> None:
    """A suite's own reward has functions alone: an error about a model speaks of the recipe's."""
    judge = "rl.reward={function: judge, judge: {path: a/b, prompt: '{{ answer }}'}}"
    suites = "suites={own: {data: {arithmetic: {}}, reward: {function: exact}}, other: addition}"
    recipe = load_recipe("quickstart", [judge, suites, "suites.other.reward=null"])
    own, other = (EvaluateStageConfig.of_suite(recipe, name) for name in ("own", "other"))
    assert said(own, "rl.reward.function") == "suites.own.reward.function"
    assert said(other, "rl.reward.judge") == "rl.reward.judge"
    assert said(other, "evaluation.stop") == "suites.other.evaluation.stop"


def test_suite_without_own_reward_refers_to_the_recipe_reward() -> None:
    suites = "suites={own: {data: {arithmetic: {}}, reward: {function: exact}}, other: addition}"
    recipe = load_recipe("quickstart", [suites, "suites.other.reward=null", "against.path=a/b"])
    for name, section in (("own", "suites.own.reward"), ("other", "rl.reward")):
        stage = EvaluateStageConfig.of_suite(recipe, name)
        for each in (stage, stage.against(recipe.against)):
            assert said(each, "rl.reward.routes") == f"{section}.routes"
            assert said(each, "data.evaluation") == f"suites.{name}.data.evaluation"


def test_training_only_model_fields_keep_evaluation_identity() -> None:
    first, second = (
        EvaluateStageConfig.of_suite(measured(ADDITION, f"model.max_length={length}"), "addition")
        for length in (64, 128)
    )
    assert first.identity_values() == second.identity_values()
    other = measured(ADDITION, "model.chat_template='{{ messages }}'")
    assert (
        EvaluateStageConfig.of_suite(other, "addition").identity_values() != first.identity_values()
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("evaluation={num_samples: 8, pass_at: [8]}",),
            "evaluation.num_samples: got 8; the recipe has no data of its own, and this changes no "
            "suite; set suites.addition.evaluation.num_samples",
        ),
        (("evaluation.confidence=0.9",), "evaluation.confidence: got 0.9; the recipe has no data"),
        (
            ("rl.reward.function=math",),
            "rl.reward.function: got 'math'; every suite has a reward of its own; set "
            "suites.addition.reward.function",
        ),
        (("promote.model_name=x",), "promote.model_name: got 'x'; nothing is trained here; remove"),
        (("rl.group_size=2",), "rl.group_size: got 2; nothing is trained here; remove it"),
        (("rl.optimizer.lr=0.1",), "rl.optimizer: got other values; nothing is trained here"),
        (("rl.sampling.temperature=0.5",), "rl.sampling.temperature: got 0.5; nothing is trained"),
        (("checkpoint.num_keep=3",), "checkpoint.num_keep: got 3; nothing is trained here"),
        (("merge.dtype=bfloat16",), "merge.dtype: got 'bfloat16'; nothing is trained here"),
    ],
)
def test_a_setting_that_suites_alone_do_not_read_is_refused(
    overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(ADDITION, *overrides)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_what_suites_alone_do_read_is_taken() -> None:
    own = measured(ADDITION, "suites.addition.reward=null", "rl.reward.function=math")
    assert EvaluateStageConfig.of_suite(own, "addition").reward.function == "math"
    short = measured("suites={a: {data: {arithmetic: {}}}}", "rl.sampling.max_new_tokens=3")
    assert EvaluateStageConfig.of_suite(short, "a").evaluation.max_new_tokens == 3
    data = measured(
        "data={arithmetic: {num_sft: 0, num_rl: 0}}",
        "evaluation.num_samples=8",
        "promote.min_value=1",
    )
    assert EvaluateStageConfig.from_recipe(data).evaluation.num_samples == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pass_at": [1, 8]}, "got [1, 8] without num_samples, and nothing is sampled; need "
         "num_samples 8 or more"),
        ({"temperature": 0.5}, "got 0.5 without num_samples"),
        ({"top_p": 0.9}, "got 0.9 without num_samples"),
        ({"top_k": 5}, "got 5 without num_samples"),
    ],
)  # fmt: skip
def test_what_is_said_of_samples_needs_samples(given: dict[str, Any], said: str) -> None:
    [name] = given
    with pytest.raises(ConfigError) as caught:
        measured(ADDITION, f"suites.addition.evaluation={given}")
    assert str(caught.value).startswith(f"suites.addition.evaluation.{name}: {said}")
    off = measured(ADDITION, f"suites.addition.evaluation={ {'num_samples': 0, **given} }")
    found = off.suites["addition"].evaluation
    assert found.num_samples == 0
    assert EvaluationConfig.model_validate(found.model_dump(mode="json")) == found
    usual = {"pass_at": [1], "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    measured(ADDITION, f"suites.addition.evaluation={usual}")


def test_samples_of_a_recipe_are_switched_off_by_their_number() -> None:
    off = load_recipe("quickstart", ["evaluation.num_samples=0"]).evaluation
    assert (off.num_samples, off.pass_at) == (0, (1, 4))


def test_trained_model_is_evaluated_on_suites_and_compared(tmp_path: Path) -> None:
    recipe = load_recipe(
        "quickstart",
        [ADDITION, "against.path=owner/name", "rl.num_rounds=0", "promote.suite=addition"],
    )
    stages = planned(recipe, tmp_path)
    assert [*stages] == [
        "preprocess_addition",
        "preprocess",
        "sft",
        "evaluate_sft",
        "merge",
        "evaluate",
        "evaluate_against",
        "compare",
        "evaluate_addition",
        "evaluate_addition_against",
        "compare_addition",
        "promote",
    ]


def test_the_incumbent_is_measured_on_the_suite_that_decides(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [ADDITION, "promote.suite=addition", "rl.num_rounds=0"])
    recipe = recipe.model_copy(update={"hardware": KNOWN})
    asked: dict[str, Any] = {}

    class Noting(Planner):
        def run(self, request: Any) -> Any:
            asked[request.label] = request
            return super().run(request)

    noting = Noting(LocalStorage(tmp_path / "store"), recipe.seed, {})
    run_stages(recipe, noting, lambda model: model)
    ours, theirs = asked["evaluate_addition"], asked["evaluate_incumbent"]
    assert theirs.config.identity_values() == ours.config.identity_values()
    assert theirs.inputs["dataset"] == ours.inputs["dataset"]
    assert asked["promote"].inputs["evaluation"].uri == "evaluate_addition"


def test_without_training_the_model_itself_is_measured(tmp_path: Path) -> None:
    assert [*planned(measured(ADDITION), tmp_path)] == ["preprocess_addition", "evaluate_addition"]
    own = measured("data={arithmetic: {num_sft: 0, num_rl: 0}}")
    assert [*planned(own, tmp_path)] == ["preprocess", "evaluate"]


def test_training_rows_are_compared_with_a_suite_s(tmp_path: Path) -> None:
    """What only measures has none to compare, and its dataset is that of any other suite."""
    with_suite = planned(load_recipe("quickstart", [ADDITION]), tmp_path)
    assert [*with_suite["preprocess"].inputs] == ["held_out.addition"]
    own = "data={arithmetic: {num_sft: 0, num_rl: 0}}"
    assert planned(measured(own, ADDITION), tmp_path)["preprocess"].inputs == {}


def test_the_rows_of_a_suite_are_those_of_any_model(tmp_path: Path) -> None:
    first, second = (
        planned(measured(ADDITION, f"model.path=owner/{name}"), tmp_path) for name in "ab"
    )
    same = first["preprocess_addition"].fingerprint == second["preprocess_addition"].fingerprint
    assert same
    assert first["preprocess_addition"].fingerprint


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("suites={x: gsm9k}",), "suite: no 'gsm9k'; known: addition, aime_2024, gsm8k"),
        (("suites={x: ./absent.yaml}",), "suite: ./absent.yaml is no file"),
        (("suites={sft: addition}",), "suites.sft: that is the name of a stage's evaluation"),
        (("suites={rl_round_7: addition}",), "suites.rl_round_7: that is the name"),
        (("suites={final: addition}",), "suites.final: that is the name of a stage's evaluation"),
        (("suites={preference_2: addition}",), "suites.preference_2: that is the name"),
        (("suites={a: addition, a_against: addition}",), "suites.a_against: that is the name"),
        (("suites={Big: addition}",), "suites.Big"),
        (
            ("suites={x: {data: {arithmetic: {}, on_overlong: drop}}}",),
            "suites.x.data.on_overlong: got a training setting; a suite serves any model",
        ),
        (
            ("suites={x: {data: {arithmetic: {}, decontamination: {}}}}",),
            "suites.x.data.decontamination: got a training setting; a suite serves any model",
        ),
        (
            (ADDITION, "suites.addition.reward.function=nope"),
            "suites.addition.reward.function: no 'nope'; known: ",
        ),
        (
            (ADDITION, "suites.addition.evaluation.structured_output={regex: '[0-9]+'}"),
            "suites.addition.evaluation.structured_output: rollout.engine",
        ),
        (
            (ADDITION, "promote.suite=addition", "promote.metric=pass@8"),
            "promote.metric: got pass@8; suites.addition.evaluation has num_samples 0",
        ),
        (("promote.metric=pass@8",), "promote.metric: got pass@8; evaluation has num_samples 4"),
        (("suites={x: {reward: {function: exact}}}",), "suites.x.data"),
        (
            ("suites={x: {data: {sft: [{path: owner/name}], evaluation: [{path: owner/name}]}}}",),
            "suites.x.data.sft: got a source; a suite only measures",
        ),
        (
            ("suites={x: {data: {arithmetic: {}}, reward: {model: {path: owner/name}}}}",),
            "suites.x.reward.model: got a model; need functions only",
        ),
        (
            ("suites={x: {data: {evaluation: [{path: ./absent.parquet}]}}}",),
            "suites.x.data.evaluation.0.path: ./absent.parquet does not exist",
        ),
        (
            (ADDITION, "suites.addition.evaluation.num_problems=513"),
            "suites.addition.evaluation.num_problems: got 513; suites.addition.data.arithmetic."
            "num_eval makes 512",
        ),
        (
            (ADDITION, "promote.suite=addition3"),
            "promote.suite: no 'addition3'; known: addition; did",
        ),
        (("against={init: random}",), "against.init: got random"),
        (("sft=null", "rl.num_rounds=0"), "rl.num_rounds: got 0 with sft: null"),
        (("data=null",), "data: missing; set data.arithmetic"),
        (("data.arithmetic.num_rl=0",), "data.arithmetic.num_rl: got 0; the recipe has a stage"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    overrides: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "data: missing, and there are no suites to measure"),
        ((ADDITION, "reward_model={}"), "reward_model: got a section"),
    ],
)
def test_nothing_to_measure(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(*overrides)
    assert str(caught.value).startswith(said)
