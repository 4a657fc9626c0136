"""Suites that another harness asks: their stages, their order, and what is said without it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.config.stages.final import CompareStageConfig, HarnessStageConfig
from engines.config.training import HardwareConfig
from flows.plan import Planner
from flows.preflight import request_of
from flows.recipe.recipe import Recipe, load_recipe, parse_recipe
from flows.recipe.source import with_overrides
from flows.report.report import measured_tables
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.store.storage import LocalStorage

KNOWN = HardwareConfig(platform="cpu", device_kind="x86_64")
ARC = "suites.arc={harness: {tasks: [arc_easy], num_fewshot: 0, limit: null}}"
ENVIRONMENT = "infra.plugins.interpreter_of"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job environment in which nothing is installed."""
    python = tmp_path / "lm-eval" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(ENVIRONMENT, {"lm-eval": python}.get)
    return python


def planned(recipe: Recipe, root: Path) -> dict[str, Any]:
    asked: dict[str, Any] = {}

    class Noting(Planner):
        def run(self, request: Any) -> Any:
            asked[request.label] = request
            return super().run(request)

    recipe = recipe.model_copy(update={"hardware": KNOWN})
    run_stages(recipe, Noting(LocalStorage(root / "store"), recipe.seed, {}), lambda _: None)
    return asked


def only_measured(*overrides: str) -> Recipe:
    nothing_trains = {"sft": None, "rl": {"num_rounds": 0}}
    data = {"name": "measured", "model": {"path": "owner/name"}, **nothing_trains}
    return parse_recipe(with_overrides(data, overrides))


def test_a_trained_model_is_asked_where_suites_are_measured(tmp_path: Path, python: Path) -> None:
    recipe = load_recipe(
        "quickstart",
        [ARC, "suites.sums=addition", "against.path=owner/name", "rl.num_rounds=0"],
    )
    stages = planned(recipe, tmp_path)
    assert [*stages][-7:] == [
        "evaluate_sums",
        "evaluate_sums_against",
        "compare_sums",
        "harness_arc",
        "harness_arc_against",
        "compare_arc",
        "promote",
    ]
    ours, theirs = stages["harness_arc"], stages["harness_arc_against"]
    assert ours.config.interpreter == python
    assert ours.inputs.keys() == {"model"}
    assert theirs.inputs == {}
    assert theirs.config.model.path == "owner/name"
    assert stages["preprocess"].inputs.keys() == {"held_out.sums"}
    assert dict(ours.config.plugins()) == {
        "platform": "cpu",
        "rollout": "transformers",
        "backend": "fsdp2",
    }


def test_names_and_places_do_not_count_and_what_is_asked_does(tmp_path: Path, python: Path) -> None:
    del python
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").write_text("task: own\n")

    def fingerprint(name: str, **harness: Any) -> str:
        suite = json.dumps({"harness": {"tasks": ["own"], "include": str(tasks), **harness}})
        return planned(only_measured(f"suites.{name}={suite}"), tmp_path)[
            f"harness_{name}"
        ].fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    moved = tasks.rename(tmp_path / "moved")
    tasks = moved
    assert fingerprint("a") == first
    assert fingerprint("a", limit=3) != first
    (tasks / "own.yaml").write_text("task: own\nnum_fewshot: 1\n")
    assert fingerprint("a") != first


def test_the_look_reads_no_rows_of_it(python: Path) -> None:
    del python
    look = request_of(only_measured(ARC))
    assert look is not None
    again = type(look).model_validate_json(look.model_dump_json())
    assert again.suites["arc"].harness == look.suites["arc"].harness


def test_without_its_environment_the_plan_says_what_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ENVIRONMENT, {}.get)
    with pytest.raises(ConfigError) as caught:
        only_measured(ARC)
    assert str(caught.value) == (
        "suites.arc.harness: lm_eval needs the job environment lm-eval: make env-lm-eval"
    )


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ("{}", "suites.x.data: got neither of data and harness; need one of them"),
        (
            "{harness: {tasks: [a]}, data: {arithmetic: {}}}",
            "suites.x.data: got both of data and harness; need one of them",
        ),
        (
            "{harness: {tasks: [a]}, reward: {function: exact}}",
            "suites.x.reward: got one beside harness",
        ),
        (
            "{harness: {tasks: [a]}, evaluation: {max_new_tokens: 3}}",
            "suites.x.evaluation: got one beside harness",
        ),
        ("{harness: {tasks: []}}", "suites.x.harness.tasks"),
        ("{harness: {tasks: [a, a]}}", "suites.x.harness.tasks: got ['a', 'a']; need names"),
        (
            "{harness: {tasks: [a], include: ./absent}}",
            "suites.x.harness.include: ./absent is no directory",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    suite: str, said: str, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del python
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        only_measured(f"suites.x={suite}")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_harness_promotes_nobody(python: Path) -> None:
    del python
    with pytest.raises(ConfigError, match=r"promote\.suite: got arc, which a harness asks"):
        load_recipe("quickstart", [ARC, "promote.suite=arc"])


def test_the_tasks_directory_is_that_of_whoever_loads_the_recipe(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del python
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    stage = HarnessStageConfig.from_recipe(
        only_measured("suites.x={harness: {tasks: [a], include: ./own}}"), "x"
    )
    assert stage.harness.include == str(tmp_path / "own")
    assert isinstance(stage, HarnessStageConfig)


def test_the_report_has_each_metric_with_its_interval() -> None:
    metrics = {
        "num_problems": 4.0,
        "arc_easy/acc": 0.25,
        "arc_easy/acc_low": 0.125,
        "arc_easy/acc_high": 0.375,
        "pile/word_perplexity": 12.5,
    }
    assert measured_tables({"harness_arc": metrics}) == [
        "| harness | metric | value | interval |",
        "|---|---|---:|---|",
        "| harness_arc | arc_easy/acc | 0.25 | [0.125, 0.375] |",
        "| harness_arc | pile/word_perplexity | 12.5 |  |",
        "",
    ]


def test_harness_intervals_use_the_confidence_of_the_recipe(
    python: Path,
) -> None:
    recipe = only_measured(ARC, "evaluation.confidence=0.8", "against.path=a/b")
    found = (
        HarnessStageConfig.from_recipe(recipe, "arc").confidence,
        CompareStageConfig.from_recipe(recipe, "arc").confidence,
    )
    assert found == (0.8, 0.8)


def test_evaluation_settings_unread_by_a_harness_are_refused(python: Path) -> None:
    with pytest.raises(ConfigError, match=r"^evaluation.num_samples: got 8; a harness's tasks"):
        only_measured(ARC, "evaluation.num_samples=8")


@pytest.mark.parametrize("override", ["evaluation.max_new_tokens=64", "rl.reward.timeout_s=60"])
@pytest.mark.usefixtures("python")
def test_recipe_cannot_set_how_harness_tasks_are_judged(override: str) -> None:
    with pytest.raises(ConfigError, match="a harness's tasks define .*; remove it"):
        only_measured(ARC, override)
