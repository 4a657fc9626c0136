"""The recorder: nothing of MLflow is touched while stages are reused, and order is kept."""

import threading
from pathlib import Path

from engines.config.stages import PromoteConfig, PromoteStageConfig
from infra.store.stage_spec import Artifact, CommitRecord
from infra.tracking.tracker import Tracker
from tasks.runner.identity import StageRequest
from tasks.runner.recorder import Recorder, end_status

ARTIFACT = Artifact(kind="promotion", uri="/x", digest="d" * 64)
RECORD = CommitRecord(
    fingerprint="f" * 64,
    stage="promote",
    artifact=ARTIFACT,
    attempt=0,
    metrics={"accuracy": 0.5},
    committed_at="2026-01-01T00:00:00+00:00",
)


def request(label: str) -> StageRequest:
    kind = type(label, (PromoteStageConfig,), {"stage": label})
    return StageRequest(kind(promote=PromoteConfig()), inputs={"evaluation": ARTIFACT}, seed=0)


def test_a_run_that_reuses_everything_never_opens_a_tracker(tmp_path: Path) -> None:
    def refuse() -> Tracker:
        raise AssertionError("opened")

    threads = threading.active_count()
    recorder = Recorder(refuse, "run", {}, {})
    recorder.stage_reused(request("sft"), RECORD)
    recorder.run_finished(tmp_path, {})
    recorder.close()
    assert threading.active_count() == threads


def test_a_broken_tracker_costs_a_warning_and_nothing_else(caplog, tmp_path: Path) -> None:
    def broken() -> Tracker:
        raise RuntimeError("no database here")

    recorder = Recorder(broken, "run", {}, {})
    recorder.stage_started(request("sft"))
    recorder.ship("sft", tmp_path / "journal.jsonl")
    recorder.stage_finished("sft", tmp_path / "journal.jsonl", RECORD)
    recorder.close()
    assert "MLflow: no database here" in caplog.text


def test_who_ended_a_run() -> None:
    assert end_status(ValueError()) == "FAILED"
    assert end_status(KeyboardInterrupt()) == "KILLED"
