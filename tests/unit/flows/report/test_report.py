"""The report: numbers, files, and plots that are drawn once."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.config.recipe import LocationConfig
from flows.recipe.recipe import Recipe, load_recipe
from flows.report.plots import Curve, PlotData, draw_plots
from flows.report.report import (
    build_report,
    distinct_names,
    markdown,
    measured_tables,
    plot_data,
    source_table,
    write_report,
)
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact
from infra.store.storage import LocalStorage, open_storage
from infra.tracking.journal import Journal, StageHistory
from tasks.runner.run import StageResult, headline_metric


def result(label: str, metrics: dict[str, float], *, reused: bool = False) -> StageResult:
    digest = f"{abs(hash(label)):064x}"[:64]
    return StageResult(
        label=label,
        fingerprint=f"fingerprint-{label}",
        artifact=Artifact(kind="policy", uri="/x", digest=digest),
        reused=reused,
        wall_s=2.0,
        metrics=metrics,
        job_seconds={"load": 1.0, "train": 2.5, "total": 4.0},
    )


RESULTS = [
    result("preprocess", {"num_rl": 10.0}, reused=True),
    result("sft", {"num_steps": 2.0}),
    result("evaluate_sft", {"accuracy": 0.4, "accuracy_low": 0.3}),
    result("rl_round_1", {"num_steps": 2.0}),
    result("evaluate_rl_round_1", {"accuracy": 0.7}),
    result("rl_round_2", {"num_steps": 3.0}),
    result("evaluate_rl_round_2", {"accuracy": 0.9}),
    result("evaluate", {"accuracy": 0.91, "accuracy_low": 0.88, "accuracy_high": 0.93}),
    result("promote", {"accuracy": 0.91, "promoted": 1.0}),
]


TIMES = {
    ("rl_round_1", 1): {"timing_s/gen": 9.0, "timing_s/update_actor": 1.0, "timing_s/step": 10.5},
    ("rl_round_1", 2): {"timing_s/gen": 3.0, "timing_s/step": 3.0},
    ("rl_round_2", 1): {
        "timing_s/gen": 5.0,
        "timing_s/update_actor": 2.0,
        "timing_s/update_weights": 1.0,
        "timing_s/step": 9.0,
    },
}
"""The second step of the first round trained on nothing."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    steps = {"sft": ("train/loss", [3.0, 2.0]), "rl_round_1": ("critic/score/mean", [0.2, 0.4])}
    steps["rl_round_2"] = ("critic/score/mean", [0.6])
    for label, (metric, values) in steps.items():
        found = {
            step: {metric: value, **TIMES.get((label, step), {})}
            for step, value in enumerate(values, start=1)
        }
        record(tmp_path, label, found)
    return tmp_path


def record(home: Path, label: str, steps: Mapping[int, Mapping[str, float]]) -> None:
    """Have a stage write its journal."""
    store = LocalStorage(home / "store")
    store.attempts.hold(f"fingerprint-{label}", Holder(id="test", process="test"), 0)
    directory = store.channel(f"fingerprint-{label}").local_dir(0)
    with Journal(directory / "journal.jsonl") as journal:
        for step, values in steps.items():
            journal.metrics(step, values)


def looked(accuracy: float) -> dict[str, float]:
    """What held-out pairs said."""
    ends = {"_low": accuracy - 0.1, "_high": accuracy + 0.1, "": accuracy}
    return {f"val-core/pair_accuracy{end}": value for end, value in ends.items()}


@pytest.fixture
def recipe(home: Path) -> Recipe:
    location = LocationConfig(home=str(home))
    return load_recipe("quickstart").model_copy(update={"location": location})


@pytest.fixture
def history(home: Path) -> StageHistory:
    return StageHistory(open_storage(str(home / "store")))


def test_the_report_for_machines(home: Path, recipe: Recipe, history: StageHistory) -> None:
    directory = write_report(build_report(recipe, RESULTS, 12.5), recipe, history)
    data = json.loads((directory / "report.json").read_text())
    assert directory == home / "runs" / recipe.run_name
    assert data["accuracy"] == {"sft": 0.4, "rl_round_1": 0.7, "rl_round_2": 0.9, "final": 0.91}
    assert list(data["accuracy"]) == ["sft", "rl_round_1", "rl_round_2", "final"]
    assert data["seconds"] == 12.5
    assert data["promoted"] is True
    assert [stage["name"] for stage in data["stages"]] == [each.label for each in RESULTS]
    assert data["stages"][0]["reused"] is True
    assert data["stages"][0]["seconds"] == 4.0, "of the job that did the work"
    assert data["stages"][1]["seconds"] == 2.0
    assert data["stages"][2]["metrics"]["accuracy"] == 0.4
    assert set(data["stages"][1]) >= {"name", "reused", "seconds", "digest", "metrics"}
    assert json.loads((directory / "recipe.json").read_text())["name"] == "quickstart"


def test_the_report_for_people(recipe: Recipe, history: StageHistory) -> None:
    report = build_report(recipe, RESULTS, 12.5)
    directory = write_report(report, recipe, history)
    text = (directory / "report.md").read_text()
    assert "| sft | ran | 2.0 |" in text
    assert "| preprocess | reused | 4.0 |" in text
    assert "final 91.0%" in text
    assert "![Reward](reward.svg)" in text
    for name in ("accuracy", "reward", "loss", "time"):
        assert (directory / f"{name}.svg").read_text().lstrip().startswith("<?xml")
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (directory / "lengths.svg").exists(), "nothing was recorded about lengths"
    for stage in ("reward_model", "preference", "distillation"):
        assert not [*directory.glob(f"{stage}*")], "it did not run"
    assert "data:image/svg+xml;base64," in markdown(report, directory, embed=True)


PAIRS = {
    "num_steps": 2.0,
    "num_pairs": 64.0,
    "pair_accuracy": 0.75,
    "pair_accuracy_low": 0.63,
    "pair_accuracy_high": 0.84,
    "pair_margin": 1.25,
    "before/pair_accuracy": 0.5,
    "before/pair_accuracy_low": 0.38,
    "before/pair_accuracy_high": 0.62,
    "before/pair_margin": 0.0,
}


def test_a_run_with_a_reward_model_and_iterations_of_preferences(
    home: Path, recipe: Recipe, history: StageHistory
) -> None:
    record(home, "reward_model", {0: looked(0.5), 1: {"train/loss": 0.7}, 2: looked(0.75)})
    for label in ("preference_1", "preference_2"):
        steps = {0: looked(0.5), 1: {"train/loss": 0.7, "preference/margin": 0.1}}
        record(home, label, {**steps, 2: {"train/loss": 0.6, **looked(0.75)}})
    stages = ("reward_model", "preference_1", "preference_2")
    results = [*RESULTS[:2], *(result(label, PAIRS) for label in stages)]
    report = build_report(recipe, results, 12.5)
    directory = write_report(report, recipe, history)
    curves = {path.stem for path in directory.glob("*.svg")} - {"loss", "time"}
    of_preference = {f"preference_{part}" for part in ("accuracy", "loss", "margin")}
    assert curves == {"reward_model_accuracy", "reward_model_loss", *of_preference}
    text = (directory / "report.md").read_text()
    assert "![Preferences: pairs told apart](preference_accuracy.svg)" in text
    assert "| preference_2 | ran | 2.0 | `" in text
    assert "| pair accuracy 50.0% -> 75.0% |" in text
    line = "| 64 | 50.0% [38.0%, 62.0%] | 75.0% [63.0%, 84.0%] | 0 | 1.25 |"
    for label in stages:
        assert f"| {label} {line}" in text
    shown = plot_data(report, history).preference.held_out
    assert [list(curve.steps) for curve in shown] == [[0, 2], [2, 4]]
    assert [list(curve.high) for curve in shown] == [[0.6, 0.85], [0.6, 0.85]]


def test_stage_without_start_metrics_shows_its_end_metrics() -> None:
    metrics = {name: value for name, value in PAIRS.items() if not name.startswith("before/")}
    *_, row, _ = measured_tables({"preference": metrics, "merge": {"size_bytes": 1.0}})
    assert row == "| preference | 64 |  | 75.0% [63.0%, 84.0%] |  | 1.25 |"
    assert headline_metric(metrics) == "pair accuracy 75.0%"


def test_a_table_for_each_evaluation_of_several_sources() -> None:
    metrics = {
        "accuracy": 0.4,
        "source/openai/gsm8k/num_problems": 20.0,
        "source/openai/gsm8k/accuracy": 0.5,
        "source/openai/gsm8k/accuracy_low": 0.3,
        "source/openai/gsm8k/accuracy_high": 0.7,
        "source/openai/gsm8k/maj@4": 0.625,
        "source/math/num_problems": 5.0,
        "source/math/accuracy": 0.2,
        "source/math/best@4": 0.25,
    }
    assert source_table("evaluate_sft", metrics) == [
        "`evaluate_sft` by data source:",
        "",
        "| data source | problems | accuracy | best@4 | maj@4 |",
        "|---|---:|---:|---:|---:|",
        "| math | 5 | 20.0% | 0.25 |  |",
        "| openai/gsm8k | 20 | 50.0% [30.0%, 70.0%] |  | 62.5% |",
        "",
    ]
    assert source_table("evaluate", {"accuracy": 0.4}) == []


def test_curves_run_on_from_round_to_round(recipe: Recipe, history: StageHistory) -> None:
    data = plot_data(build_report(recipe, RESULTS, 1.0), history)
    assert data.curves["reward"] == Curve([1, 2, 3], [0.2, 0.4, 0.6], [3])
    assert data.curves["loss"] == Curve([1, 2], [3.0, 2.0], [])
    assert [(bar.label, bar.low) for bar in data.accuracy] == [
        ("sft", 0.3),
        ("round 1", None),
        ("round 2", None),
        ("final", 0.88),
    ]
    assert {phase: seconds for phase, seconds in data.step.items() if seconds} == {
        "gen": 7.0,
        "update_actor": 1.5,
        "update_weights": 0.5,
        "other": 0.75,
    }
    assert list(data.step)[-3:] == ["update_actor", "update_weights", "other"]
    assert data.seconds["sft"] == {"load": 1.0, "train": 2.5, "other": 0.5}


def test_fully_reused_run_keeps_the_report_of_the_work(
    recipe: Recipe, history: StageHistory
) -> None:
    directory = write_report(build_report(recipe, RESULTS, 12.5), recipe, history)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    again = [each.model_copy(update={"reused": True}) for each in RESULTS]
    assert write_report(build_report(recipe, again, 0.5), recipe, history) == directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    # A report that is gone is written again, with the times of the work.
    (directory / "report.json").unlink()
    write_report(build_report(recipe, again, 0.5), recipe, history)
    data = json.loads((directory / "report.json").read_text())
    assert {stage["seconds"] for stage in data["stages"]} == {4.0}


def test_equal_data_is_drawn_into_equal_files(tmp_path: Path) -> None:
    data = PlotData({"reward": Curve([1, 2, 3], [0.1, 0.2, 0.3])})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert [path.name for path in draw_plots(data, tmp_path / name)] == ["reward.svg"]
    assert (tmp_path / "a/reward.svg").read_bytes() == (tmp_path / "b/reward.svg").read_bytes()


def test_equal_stages_of_one_run_are_numbered() -> None:
    labels = ["sft", "preference", "preference", "preference_2", "preference"]
    names = ["sft", "preference", "preference_2", "preference_2_2", "preference_3"]
    assert distinct_names(labels) == names
