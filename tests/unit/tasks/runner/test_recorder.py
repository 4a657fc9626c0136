"""The recorder: one run per pipeline run, nothing opened in vain, stages below who made them."""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.sections import PromoteConfig
from engines.config.stages.final import PromoteStageConfig
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import open_storage
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import Ledger
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import RunState, TrackerSettings
from tasks.runner import recorder as recorder_module
from tasks.runner.recorder import Recorder, end_status
from tasks.runner.run import StageRequest

ARTIFACT = Artifact(kind="evaluation", uri="/x", digest="d" * 64)


def request(label: str) -> StageRequest:
    kind = type(label, (PromoteStageConfig,), {"stage": label})
    return StageRequest(kind(promote=PromoteConfig()), given={"evaluation": ARTIFACT}, seed=0)


def record(of: StageRequest) -> CommitRecord:
    return CommitRecord(
        fingerprint=of.fingerprint, stage="promote", artifact=ARTIFACT, attempt=0,
        metrics={"accuracy": 0.5}, committed_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


@pytest.fixture
def tracker(tmp_path: Path) -> JsonLinesTracker:
    return JsonLinesTracker(TrackerSettings(tmp_path))


@pytest.fixture
def start(tmp_path: Path, tracker: JsonLinesTracker) -> Callable[[str], Recorder]:
    history = StageHistory(open_storage(str(tmp_path / "store")))

    def start(identity: str) -> Recorder:
        return Recorder(
            Shipper(Ledger(tmp_path, tracker.address, "s"), tracker, history, ship_every_s=0.01),
            identity={"flow_run_id": identity}, name="tiny", params={"a": 1}, tags={},
            store_uri="s",
        )  # fmt: skip

    return start


def runs(tracker: JsonLinesTracker) -> dict[str, dict]:
    return {line["key"]: tracker.run(line["key"]) for line in tracker._lines() if "key" in line}


def parents(tracker: JsonLinesTracker) -> list[dict]:
    return [run for run in runs(tracker).values() if run["parent"] is None]


def whole_run(start: Callable[[str], Recorder], identity: str, home: Path) -> None:
    recorder = start(identity)
    recorder.stage_started(request("sft"))
    recorder.stage_finished(request("sft"), record(request("sft")))
    recorder.run_finished(home / "runs", {"accuracy/final": 0.5})
    recorder.close()


def test_a_repetition_that_reuses_everything_opens_nothing(
    start: Callable[[str], Recorder], tracker: JsonLinesTracker, tmp_path: Path
) -> None:
    whole_run(start, "one", tmp_path)
    before = tracker.path.read_text()
    threads = threading.active_count()
    recorder = start("one")
    recorder.stage_reused(request("sft"), record(request("sft")))
    recorder.run_finished(tmp_path / "runs", {"accuracy/final": 0.5})
    recorder.close()
    assert threading.active_count() == threads
    assert tracker.path.read_text() == before


def test_a_failed_run_is_continued_by_its_retry(
    start: Callable[[str], Recorder], tracker: JsonLinesTracker, tmp_path: Path
) -> None:
    recorder = start("one")
    recorder.stage_started(request("sft"))
    recorder.stage_ended(request("sft"), "FAILED")
    recorder.run_ended("FAILED")
    recorder.close()
    assert [run["state"] for run in runs(tracker).values()] == ["FAILED", "FAILED"]
    whole_run(start, "one", tmp_path)
    assert [run["state"] for run in runs(tracker).values()] == ["FINISHED", "FINISHED"]


class InterruptedTracker(JsonLinesTracker):
    """Somebody presses Ctrl-C while it is about to note the first state."""

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        self.is_interrupted = False
        self.closings = [threading.Event(), threading.Event()]
        """That of the end, and the one in haste."""

    def set_state(
        self, run_id: str, state: RunState, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            assert self.closings[0].wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            assert self.closings[1].wait(60)
        super().set_state(run_id, state, tags, metrics)


def test_ctrl_c_while_the_end_is_told_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "CLOSE_IN_HASTE_S", 600.0)
    tracker = InterruptedTracker(TrackerSettings(tmp_path))
    history = StageHistory(open_storage(str(tmp_path / "store")))
    shipper = Shipper(Ledger(tmp_path, tracker.address, "s"), tracker, history, ship_every_s=0.01)
    recorder = Recorder(
        shipper, identity={"flow_run_id": "one"}, name="tiny", params={}, tags={}, store_uri="s"
    )
    close, closings = shipper.close, iter(tracker.closings)

    def closing(*deadlines_s: float) -> None:
        next(closings).set()
        close(*deadlines_s)

    monkeypatch.setattr(shipper, "close", closing)
    recorder.stage_started(request("sft"))
    recorder.stage_finished(request("sft"), record(request("sft")))
    recorder.run_finished(tmp_path / "runs", {})
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    assert {run["state"] for run in runs(tracker).values()} == {"FINISHED"}


def test_another_run_gets_a_parent_and_the_id_of_what_it_reuses(
    start: Callable[[str], Recorder], tracker: JsonLinesTracker, tmp_path: Path
) -> None:
    whole_run(start, "one", tmp_path)
    recorder = start("two")
    recorder.stage_reused(request("sft"), record(request("sft")))
    recorder.run_finished(tmp_path / "runs", {})
    recorder.close()
    first, second = parents(tracker)
    (stage,) = [run for run in runs(tracker).values() if run["parent"]]
    assert first["tags"] == second["tags"]
    assert second["tags"]["run.sft"]
    assert stage["parent"] == next(iter(k for k, v in runs(tracker).items() if v == first))
    assert {run["state"] for run in runs(tracker).values()} == {"FINISHED"}


def test_a_stage_that_nobody_told_of_is_told_when_it_is_reused(
    start: Callable[[str], Recorder], tracker: JsonLinesTracker, tmp_path: Path
) -> None:
    recorder = start("one")
    recorder.stage_reused(request("sft"), record(request("sft")))
    recorder.run_finished(tmp_path / "runs", {})
    recorder.close()
    (stage,) = [run for run in runs(tracker).values() if run["parent"]]
    assert (stage["state"], stage["metrics"]) == ("FINISHED", [("accuracy", 0, 0.5)])
    assert stage["tags"]["output.digest"] == ARTIFACT.digest


def test_a_run_that_fails_before_its_first_stage_opens_nothing(
    start: Callable[[str], Recorder], tracker: JsonLinesTracker
) -> None:
    recorder = start("one")
    recorder.run_ended("FAILED")
    recorder.close()
    assert not tracker.path.exists()


def test_who_ended_a_run() -> None:
    assert end_status(ValueError()) == "FAILED"
    assert end_status(KeyboardInterrupt()) == "KILLED"
