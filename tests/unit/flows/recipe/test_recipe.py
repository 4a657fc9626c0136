"""Recipes: every shipped one loads, overlays mean what they say, and stages see what they need."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.plugins import TRACKERS
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import Recipe, load_recipe, parse_recipe
from flows.recipe.source import RECIPES_DIR, overlay, parse_yaml, shipped_names
from infra.errors import ConfigError
from infra.plugins import Row


@pytest.mark.parametrize("name", shipped_names(RECIPES_DIR))
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load_recipe(name)
    # A platform, a data set and a model may be absent here; the recipe itself may not be wrong.
    assert parse_recipe(json.loads(recipe.model_dump_json())) == recipe
    assert (RECIPES_DIR / f"{name}.yaml").read_text().startswith(f"# rlhf run {name}\n")


def test_the_quickstart_trains_evaluates_and_gates() -> None:
    recipe = load_recipe("quickstart")
    assert recipe.sft is not None
    assert recipe.rl.num_rounds >= 1
    assert recipe.data.arithmetic is not None
    assert recipe.data.arithmetic.num_eval >= 500
    assert recipe.model.init == "random"


def test_overlays_are_applied_in_order_with_yaml_values() -> None:
    recipe = load_recipe(
        "quickstart",
        [
            "rl.num_rounds=7",
            "rl.num_rounds=2",
            "rl.optimizer.lr=2e-4",
            "rl.mismatch.mean=2e-4",
            "data.arithmetic.operations=[add, multiply]",
            "data.arithmetic.operations.0=subtract",
        ],
    )
    assert recipe.rl.num_rounds == 2
    assert recipe.rl.optimizer.lr == 2e-4
    assert recipe.rl.mismatch.mean == 2e-4
    assert recipe.data.arithmetic is not None
    assert recipe.data.arithmetic.operations == ("subtract", "multiply")


def test_the_seed_argument_wins() -> None:
    assert load_recipe("quickstart", ["seed=3"], seed=5).seed == 5
    assert load_recipe("quickstart", ["seed=3"]).seed == 3


def test_a_recipe_extends_another(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\nname: base\nrl: {num_rounds: 5}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nname: mine\nrl: {group_size: 4}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    quickstart = load_recipe("quickstart")
    assert recipe.name == "mine"
    assert (recipe.rl.num_rounds, recipe.rl.group_size) == (5, 4)
    assert recipe.model == quickstart.model


def test_the_run_name_is_the_recipe_not_the_place(tmp_path: Path) -> None:
    plain = load_recipe("quickstart")
    elsewhere = load_recipe("quickstart", [f"location.home={tmp_path}"])
    other = load_recipe("quickstart", ["rl.num_rounds=9"])
    assert plain.run_name == elsewhere.run_name
    assert plain.run_name != other.run_name
    assert plain.run_name.startswith("quickstart-seed0-")


def test_rounds_do_not_know_how_many_they_are() -> None:
    few, many = load_recipe("quickstart"), load_recipe("quickstart", ["rl.num_rounds=9"])
    first, second = (
        RLRoundStageConfig.from_recipe(each, 2).identity_values() for each in (few, many)
    )
    assert first == second
    assert SFTStageConfig.from_recipe(few) == SFTStageConfig.from_recipe(many)
    assert RLRoundStageConfig.from_recipe(few, 1) != RLRoundStageConfig.from_recipe(few, 2)


def test_sampling_deadline_counts_for_rounds_not_evaluations() -> None:
    slow, quick = load_recipe("quickstart"), load_recipe("quickstart", ["rollout.timeout_s=9"])
    first, second = (
        RLRoundStageConfig.from_recipe(slow, 1),
        RLRoundStageConfig.from_recipe(quick, 1),
    )
    assert first.identity_values() != second.identity_values()
    # A half-trained round goes on under another one.
    (change,) = second.changes(first)
    assert str(change) == "rollout.timeout_s 1800.0 -> 9.0"
    assert change.is_execution
    measured = [
        EvaluateStageConfig.from_recipe(each, "").identity_values() for each in (slow, quick)
    ]
    assert measured[0] == measured[1], "an evaluation with an unfinished answer is an error"


def test_derived_defaults_are_spelled_out_for_the_jobs() -> None:
    recipe = load_recipe("quickstart", ["rl.batch_size_prompts=8"])
    stage = RLRoundStageConfig.from_recipe(recipe, 1)
    assert stage.rl.prompts_per_update == 8
    for of in ("sft", ""):
        evaluation = EvaluateStageConfig.from_recipe(recipe, of).evaluation
        assert evaluation.max_new_tokens == recipe.rl.sampling.max_new_tokens


def test_local_paths_become_absolute_and_hub_ids_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}\n")
    Path("score.py").write_text("def score(*a): return 1.0\n")
    recipe = load_recipe(
        "gsm8k_qwen2.5_0.5b",
        [
            "data.rl=[{path: train.jsonl}, {path: openai/gsm8k, format: gsm8k}]",
            "rl.reward.function=score.py:score",
        ],
    )
    assert [source.path for source in recipe.data.rl] == [
        str(tmp_path / "train.jsonl"),
        "openai/gsm8k",
    ]
    assert recipe.rl.reward.function == f"{tmp_path}/score.py:score"
    assert recipe.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_schema_describes_every_section_for_the_form() -> None:
    schema = Recipe.model_json_schema()
    rl = schema["$defs"]["RLConfig"]["properties"]
    assert rl["group_size"]["description"] == "Samples per prompt."
    assert rl["group_size"]["minimum"] == 1


scalars = st.none() | st.booleans() | st.integers(-10, 10) | st.text("abc", max_size=3)
trees = st.dictionaries(
    st.text("xyz", min_size=1, max_size=2),
    st.recursive(
        scalars, lambda t: st.dictionaries(st.text("xyz", min_size=1, max_size=2), t), max_leaves=8
    ),
    max_size=4,
)


@given(trees, trees)
def test_an_overlay_wins_everywhere_and_removes_nothing(below: dict, above: dict) -> None:
    merged = overlay(below, above)
    assert overlay(merged, above) == merged
    assert set(merged) == set(below) | set(above)
    assert overlay(below, {}) == below
    for key, value in above.items():
        if not isinstance(value, dict):
            assert merged[key] == value


@given(st.text(max_size=200))
def test_any_text_is_data_or_one_line(text: str) -> None:
    problem = ""
    try:
        parse_yaml(text, "f.yaml")
    except ConfigError as error:
        problem = str(error)
    assert problem == "" or problem.startswith("f.yaml")
    assert "\n" not in problem


@given(st.binary(max_size=100))
def test_any_file_is_a_recipe_or_one_line(data: bytes) -> None:
    path = Path(os.environ["PYTEST_RECIPE_DIR"]) / "any.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert "\n" not in str(caught.value)


@pytest.fixture(autouse=True, scope="module")
def _recipe_directory(tmp_path_factory: pytest.TempPathFactory):
    # hypothesis refuses function-scoped fixtures: one directory serves all of its examples.
    os.environ["PYTEST_RECIPE_DIR"] = str(tmp_path_factory.mktemp("recipes"))
    yield
    del os.environ["PYTEST_RECIPE_DIR"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("2024-01-01", "2024-01-01"),
        ("yes", True),
        ("[1, a]", [1, "a"]),
        ("", None),
    ],
)
def test_scalars_are_what_a_reader_expects(text: str, value: object) -> None:
    assert parse_yaml(text, "v") == value


@pytest.mark.parametrize(
    ("mirrors", "words"),
    [
        ("[nothing]", "location.mirrors: no 'nothing'; known: "),
        ("[mlflow]", "location.mirrors: got mlflow twice; need each tracker once"),
        ("[absent]", "location.mirrors: absent needs the extra: pip install 'rlhf-pipeline[none]'"),
    ],
)
def test_a_mirror_that_cannot_be_is_told_by_the_plan(
    mirrors: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Row(name="absent", target="a:b", requires="no_such_module", extra="none")
    monkeypatch.setattr(TRACKERS, "rows", (*TRACKERS.rows, absent))
    with pytest.raises(ConfigError) as refused:
        load_recipe("quickstart", [f"location.mirrors={mirrors}"])
    assert words in str(refused.value)


def test_mirrors_are_no_part_of_what_a_run_is() -> None:
    plain, mirrored = (
        load_recipe("quickstart"),
        load_recipe("quickstart", ["location.mirrors=[tensorboard]"]),
    )
    assert mirrored.location.mirrors == ("tensorboard",)
    assert mirrored.run_name == plain.run_name


def test_samples_are_no_part_of_what_a_round_is() -> None:
    plain = RLRoundStageConfig.from_recipe(load_recipe("quickstart"), 1)
    fewer = RLRoundStageConfig.from_recipe(
        load_recipe("quickstart", ["rl.keep_samples.num_per_step=0"]), 1
    )
    assert fewer.identity_values() == plain.identity_values()
    assert fewer.rl.keep_samples.num_per_step == 0


def test_answers_exceeding_every_micro_batch_fail_the_plan() -> None:
    asked = ["training.max_tokens_per_micro_batch=53"]
    with pytest.raises(ConfigError, match="need 54, for 54 tokens of a prompt with its answer"):
        load_recipe("quickstart", asked)
    load_recipe("quickstart", ["training.max_tokens_per_micro_batch=54"])
    load_recipe("quickstart", [*asked, "rl.num_rounds=0"])
