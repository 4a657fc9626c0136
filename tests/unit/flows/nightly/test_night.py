"""Where a night computes, how it is kept, and what accepting it stores."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.nightly.measurement import (
    MAX_RUNS,
    Machine,
    Made,
    Measurement,
    Observed,
    Run,
    accepted,
    flattened,
    read_baseline,
    settings_of,
    write_baseline,
)
from flows.nightly.night import (
    NUM_KEPT,
    Night,
    Outcome,
    Verdict,
    accept,
    afresh,
    differences,
    judge,
    keep_night,
    last_night,
    load_matrix,
    open_night,
)
from flows.recipe.recipe import load_recipe
from flows.run.registry import tracking_uri
from infra.errors import ConfigError

MACHINE = Machine(
    platform="cpu",
    device_kind="x86_64",
    processor="a processor",
    num_cores=2,
    memory_gib=8,
    system="Linux x86_64",
)


def measured(night: str, *, digest: str = "1", lr: float = 0.1, problem: str = "") -> Measurement:
    return Measurement(
        recipe="tiny",
        machine=MACHINE,
        settings={"sft.lr": lr},
        stages={"sft": Made(digest=digest, settings=str(lr), sources="sft", libraries={})},
        sources={"sft": {"engines/x.py": digest}},
        runs=(Run(night=night, stages={"sft": Observed(curve=(2.0, 1.0), tokens_per_s=5.0)}),),
        stopped_at="merge" if problem else "",
        problem=problem,
    )


def kept(home: Path, measurement: Measurement, name: str = "20260101T000000-0123abcd") -> Night:
    outcome = Outcome(measurement=measurement, verdict=judge(None, measurement))
    night = Night(name=name, outcomes=(outcome,))
    keep_night(open_night(home, name), night)
    return night


def test_accepted_nights_are_the_spread_of_the_next(tmp_path: Path) -> None:
    for number in range(MAX_RUNS + 2):
        accept(kept(tmp_path, measured(f"{number:02}", digest=str(number))), [], tmp_path / "b")
    baseline = read_baseline(tmp_path / "b", "tiny")
    assert baseline is not None
    assert [run.night for run in baseline.runs] == [f"{n:02}" for n in range(2, MAX_RUNS + 2)]
    assert baseline.stages["sft"].digest == str(MAX_RUNS + 1), "of the newest"


def test_a_night_that_is_accepted_twice_counts_once() -> None:
    night = measured("1")
    assert accepted(accepted(None, night), night) == night


@pytest.mark.parametrize(
    "tonight",
    [
        measured("2", lr=0.2),
        measured("2").model_copy(update={"machine": MACHINE.model_copy(update={"num_cores": 9})}),
    ],
)
def test_figures_of_other_settings_or_machines_are_no_spread(tonight: Measurement) -> None:
    assert accepted(measured("1"), tonight) == tonight


def test_what_did_not_end_cannot_be_accepted(tmp_path: Path) -> None:
    night = kept(tmp_path, measured("1", problem="out of memory"))
    with pytest.raises(ConfigError, match="tiny stopped at merge: out of memory"):
        accept(night, [], tmp_path)
    with pytest.raises(ConfigError, match="got 'other'; night .* has tiny"):
        accept(night, ["other"], tmp_path)
    assert read_baseline(tmp_path, "tiny") is None


def test_the_last_night_is_the_newest_that_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `rlhf nightly` first"):
        last_night(tmp_path)
    kept(tmp_path, measured("1"), "20260101T000000-ffffffff")
    newest = kept(tmp_path, measured("2"), "20260102T000000-00000000")
    open_night(tmp_path, "20260103T000000-00000000")
    assert last_night(tmp_path) == newest


def test_old_nights_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "nightly" / "mine").mkdir(parents=True)
    names = [f"202601{day:02}T000000-00000000" for day in range(1, NUM_KEPT + 3)]
    for name in names:
        open_night(tmp_path, name)
    left = sorted(path.name for path in (tmp_path / "nightly").iterdir())
    assert left == [*names[-NUM_KEPT:], "mine"]


def test_a_night_has_places_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
    recipe = load_recipe("quickstart", ["location.store=/team", "location.experiment=e"])
    moved = afresh(recipe, tmp_path)
    places = (
        str(moved.home),
        moved.store_uri,
        tracking_uri(moved.location).removeprefix("sqlite:///"),
    )
    assert all(place.startswith(str(tmp_path)) for place in places)
    assert afresh(load_recipe("grpo"), tmp_path).store_uri != moved.store_uri
    assert moved.run_name == recipe.run_name
    alike = load_recipe("grpo", [f"promote.model_name={recipe.promote.model_name}"])
    assert afresh(alike, tmp_path).promote.model_name != moved.promote.model_name


def test_two_recipes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 'grpo' twice"):
        load_matrix(["grpo", "quickstart", "grpo"])


def test_a_damaged_baseline_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"tiny\.json: not JSON"):
        read_baseline(tmp_path, "tiny")
    path.write_text(json.dumps({"recipe": "tiny"}))
    with pytest.raises(ConfigError, match="machine"):
        read_baseline(tmp_path, "tiny")


numbers = st.floats(allow_nan=False)
observations = st.builds(
    Observed,
    curve=st.lists(numbers, max_size=5).map(tuple),
    accuracy=st.none() | numbers,
    tokens_per_s=st.none() | numbers,
    peak_bytes=st.none() | numbers,
)
settings = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


@given(st.dictionaries(st.text(), observations), settings, st.text())
def test_a_baseline_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    stages: dict[str, Observed],
    values: dict[str, object],
    night: str,
) -> None:
    directory = tmp_path_factory.mktemp("baselines")
    runs = (Run(night=night, stages=stages),)
    measurement = measured("").model_copy(update={"runs": runs, "settings": values})
    write_baseline(directory, measurement)
    assert read_baseline(directory, "tiny") == measurement


def test_a_curve_that_is_no_number_is_kept(tmp_path: Path) -> None:
    broken = Observed(curve=(1.0, float("nan"), float("inf")))
    runs = (Run(night="1", stages={"sft": broken}),)
    write_baseline(tmp_path, measured("1").model_copy(update={"runs": runs}))
    found = read_baseline(tmp_path, "tiny")
    assert found is not None
    assert [str(value) for value in found.runs[0].stages["sft"].curve] == ["1.0", "nan", "inf"]


def test_settings_are_told_by_their_paths() -> None:
    assert flattened({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {"a.b.c": 1, "a.d": {}, "e": [2]}


def test_failed_recipes_of_a_night() -> None:
    words = {"one": "fail", "two": "drift", "three": "pass"}
    outcomes = tuple(
        Outcome(
            measurement=measured("1"), verdict=Verdict.model_validate({"recipe": n, "word": word})
        )
        for n, word in words.items()
    )
    assert Night(name="1", outcomes=outcomes).failed == ["one"]


def test_sampling_deadline_is_a_setting_only_with_rl_rounds() -> None:
    def settings(*overrides: str) -> dict[str, Any]:
        return flattened(settings_of(load_recipe("quickstart", overrides)))

    short = settings("rollout.timeout_s=60")
    assert short["rollout.timeout_s"] == 60
    assert differences(settings(), short) == ["rollout.timeout_s 1800.0 -> 60.0"]
    assert settings("rl.num_rounds=0") == settings("rl.num_rounds=0", "rollout.timeout_s=60")
