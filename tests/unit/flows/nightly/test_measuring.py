"""What is read from a store after a recipe's flow: the stages as they were requested."""

from pathlib import Path

import pytest

from engines.config.recipe import LocationConfig
from engines.config.training import HardwareConfig
from flows.nightly import measurement
from flows.nightly.measurement import WHOLE_RUN, measure, observed
from flows.nightly.night import judge
from flows.recipe.recipe import Recipe, load_recipe
from flows.stage_order import run_stages
from infra.errors import ConfigError
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, JournalRecord
from tasks.runner.run import StageRequest, StageResult

LABELS = ["preprocess", "sft", "evaluate_sft", "rl_round_1", "evaluate_rl_round_1"]
LABELS += ["merge", "evaluate", "promote"]


class Committing:
    """Commits every stage that it is asked for, up to one, with an output of its label."""

    def __init__(self, store: LocalStorage, made: Path, stop_at: str) -> None:
        self.seed = 0
        self._store, self._made, self._stop_at = store, made, stop_at

    def run(self, request: StageRequest) -> StageResult:
        if request.label == self._stop_at:
            raise InterruptedError
        directory = self._made / request.label
        directory.mkdir(parents=True)
        (directory / "file").write_text(request.label)
        artifact = self._store.publish(directory, "dataset", {})
        attempt = self._store.attempts.hold(
            request.fingerprint, Holder(id="test", process="test"), 0
        )
        local = self._store.channel(request.fingerprint).local_dir(0)
        with Journal(local / "journal.jsonl") as journal:
            journal.metrics(1, {"critic/score/mean": 0.25, "perf/throughput": 10.0})
        record = CommitRecord(
            fingerprint=request.fingerprint,
            stage=request.config.stage,
            artifact=artifact,
            attempt=0,
            seconds={"total": 2.0},
            committed_at="2026-01-01T00:00:00+00:00",
        )
        self._store.commit(attempt, record)
        return StageResult(
            label=request.label,
            fingerprint=request.fingerprint,
            artifact=artifact,
            reused=False,
            wall_s=0.0,
            metrics={},
            job_seconds={},
        )


def committed(tmp_path: Path, stop_at: str = "") -> Recipe:
    """A recipe whose store has all of its stages, or those before one."""
    recipe = load_recipe("quickstart", ["rl.num_rounds=1"]).model_copy(
        update={
            "hardware": HardwareConfig(platform="cpu", device_kind="x86_64"),
            "location": LocationConfig(home=str(tmp_path)),
        }
    )
    store = LocalStorage(tmp_path / "store")
    try:
        run_stages(recipe, Committing(store, tmp_path / "made", stop_at), lambda _: None)
    except InterruptedError:
        assert stop_at
    return recipe


def test_all_that_was_made_is_told_with_what_it_was_made_from(tmp_path: Path) -> None:
    found = measure(committed(tmp_path), "a night")
    assert [*found.stages] == LABELS
    assert len({made.digest for made in found.stages.values()}) == len(LABELS)
    assert "engines/algorithms/supervised.py" in found.sources["sft"]
    assert "engines/__init__.py" in found.sources["sft"], "a package is the file that it runs"
    assert "engines/algorithms/supervised.py" not in found.sources["rl_round_1"]
    assert found.stages["evaluate_rl_round_1"].sources == "evaluate_sft", "told once"
    assert found.stages["sft"].libraries["torch"]
    assert found.settings["rl.group_size"] == 16
    assert not [name for name in found.settings if name.startswith(("location.", "target"))]
    assert (found.machine.platform, found.machine.device_kind) == ("cpu", "x86_64")
    assert found.machine.num_cores > 0
    [run] = found.runs
    assert (run.night, [*run.stages]) == ("a night", LABELS)
    assert run.stages["sft"].curve == (0.25,)
    assert (found.stopped_at, found.problem) == ("", "")


def test_a_run_that_stopped_is_told_up_to_there(tmp_path: Path) -> None:
    found = measure(committed(tmp_path, "merge"), "a night", "no room")
    assert [*found.stages] == LABELS[:6]
    assert found.stages["merge"].digest == ""
    assert [*found.runs[0].stages] == LABELS[:5]
    assert (found.stopped_at, found.problem) == ("merge", "no room")


def test_nothing_was_committed(tmp_path: Path) -> None:
    found = measure(committed(tmp_path, "preprocess"), "a night", "no data")
    assert (found.stopped_at, found.runs[0].stages) == ("preprocess", {})


def test_what_ends_a_run_may_end_its_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = committed(tmp_path, "preprocess")

    def fails(*_: object) -> None:
        raise ConfigError("data.rl", "is not there any more")

    monkeypatch.setattr(measurement, "run_stages", fails)
    found = measure(recipe, "a night", "data.rl: is not there any more")
    assert (found.stopped_at, found.stages) == (WHOLE_RUN, {})
    assert judge(None, found).word == "fail"
    with pytest.raises(ConfigError, match="not there any more"):
        measure(recipe, "a night")


def test_a_run_that_failed_after_its_last_stage(tmp_path: Path) -> None:
    found = measure(committed(tmp_path), "a night", "the disk is full")
    assert (found.stopped_at, [*found.stages]) == (WHOLE_RUN, LABELS)


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([{"train/loss": 2.0}, {"train/loss": 1.0}], (2.0, 1.0)),
        ([{"critic/score/mean": 0.5, "train/loss": 9.0}, {}], (0.5,)),
        ([{}], ()),
    ],
)
def test_figures_of_a_stage(values: list[dict[str, float]], curve: tuple[float, ...]) -> None:
    memory = {"perf/max_memory_allocated_gb": 0.5, "perf/throughput": 100.0}
    journal = [
        JournalRecord(kind="metrics", time_ms=0, step=step, values={**each, **memory})
        for step, each in enumerate(values, start=1)
    ]
    journal.append(JournalRecord(kind="log", time_ms=0, message="a line"))
    record = CommitRecord(
        fingerprint="f",
        stage="sft",
        artifact=Artifact(kind="policy", uri="/x", digest="1"),
        attempt=0,
        metrics={"accuracy": 0.5, "accuracy_low": 0.45, "accuracy_high": 0.55},
        seconds={"load": 1.0, "total": 3.0},
        committed_at="2026-01-01T00:00:00+00:00",
    )
    found = observed(record, journal)
    assert found.curve == curve
    assert (found.accuracy, found.accuracy_room) == (0.5, 0.05)
    assert (found.tokens_per_s, found.peak_bytes) == (100.0, 0.5e9)
