"""Weights & Biases offline: each point in one part, whatever was killed; read back as written."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf.testing.test_tracker import read_wandb

from infra import env
from infra.tracking.mirrors.wandb_tracker import WandbTracker
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings

pytest.importorskip("wandb", reason="needs the extra wandb")

RUN = TrackedRun("a" * 64, "sft", params={"lr": 1e-6})
TELLER = """
import sys
from pathlib import Path
from infra.tracking.mirrors.wandb_tracker import WandbTracker
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings

tracker = WandbTracker(TrackerSettings(Path(sys.argv[1])))
run_id = tracker.open_run(TrackedRun("a" * 64, "sft", params={"lr": 1e-6}))
tracker.log_metrics(run_id, [MetricPoint("loss", step / 4, step, step) for step in (1, 2)], "2")
tracker.set_state(run_id, "FINISHED", {"output.digest": "d"}, {"accuracy": 0.5})
"""


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbTracker]:
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    yield WandbTracker(TrackerSettings(tmp_path))
    import wandb

    wandb.teardown()


def points(*steps: int) -> list[MetricPoint]:
    return [MetricPoint("loss", step / 4, step, step) for step in steps]


@pytest.mark.slow
def test_a_part_whose_writer_was_killed_is_written_anew(
    tracker: WandbTracker, tmp_path: Path
) -> None:
    """SIGKILL when the library has taken a part and nobody has noted it."""
    command = [sys.executable, "-c", TELLER, str(tmp_path)]
    for faults, code in (("atomic.before_rename=kill@4", -signal.SIGKILL), (None, 0)):
        surroundings = env.child_environment(
            RLHF_FAULTS=faults, WANDB_API_KEY=None, WANDB_MODE=None
        )
        ended = subprocess.run(command, env=surroundings, timeout=120, check=False)
        assert ended.returncode == code
    run_id = tracker.open_run(RUN)
    assert [path.name for path in (tracker.root / run_id).glob("part-*")] == ["part-0"]
    seen = read_wandb(tracker, run_id)
    assert seen["metrics"] == [("accuracy", 0, 0.5), ("loss", 1, 0.25), ("loss", 2, 0.5)]
    assert seen["tags"]["output.digest"] == "d"


def test_what_comes_after_an_end_is_a_part_of_its_own(tracker: WandbTracker) -> None:
    """Headline numbers are of a step that was passed: they stand in the summary."""
    run_id = tracker.open_run(RUN)
    tracker.log_metrics(run_id, points(1, 2), "2")
    tracker.set_state(run_id, "KILLED", {}, {})
    tracker.log_metrics(run_id, points(3), "3")
    for _ in range(2):
        tracker.set_state(run_id, "FINISHED", {}, {"accuracy": 0.5})
    parts = sorted(path.name for path in (tracker.root / run_id).glob("part-*"))
    assert parts == ["part-0", "part-1"]
    told = [("accuracy", 0, 0.5), *(("loss", step, step / 4) for step in (1, 2, 3))]
    assert read_wandb(tracker, run_id)["metrics"] == told


def test_it_is_offline_unless_it_is_told_otherwise(
    tracker: WandbTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracker.mode == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert tracker.mode == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracker.mode == "offline"
