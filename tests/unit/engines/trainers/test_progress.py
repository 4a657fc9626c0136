"""When a step checkpoint is due, and that it keeps what the loop gave it."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.background import write_in_background
from engines.checkpoint.step_store import StepCheckpoints
from engines.trainers.progress import StageProgress
from engines.trainers.step_timer import PhaseClock
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal


class FileWorkers:
    """A group whose state is one file, written and read as a policy's would be."""

    world_size = 1

    def __init__(self) -> None:
        self.loaded = ""

    def run(self, method: Callable[..., Any], path: Path, *step: int) -> None:
        def write() -> None:
            (path / "state.txt").write_text(f"after step {step[0]}", encoding="utf-8")

        if method.__name__ == "save_checkpoint":
            write()
        elif method.__name__ == "begin_checkpoint":
            write_in_background(write, path, 0)
        else:
            self.loaded = (path / "state.txt").read_text(encoding="utf-8")

    def close(self) -> None:
        pass


def progress_in(
    work: Path, journal: Journal, num_steps: int = 5, background_timeout_s: float | None = None
) -> StageProgress:
    return StageProgress(
        journal,
        Heartbeat(work / "heartbeat.json", 60.0),
        StepCheckpoints(work / "checkpoints", 10),
        2,
        num_steps,
        PhaseClock(),
        background_timeout_s,
    )


def saved(work: Path) -> list[int]:
    return StepCheckpoints(work / "checkpoints", 10).steps()


@pytest.mark.parametrize("background_timeout_s", [None, 20.0], ids=["waiting", "background"])
def test_every_second_step_and_the_last(tmp_path: Path, background_timeout_s: float | None) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        progress = progress_in(tmp_path, journal, background_timeout_s=background_timeout_s)
        with pytest.raises(RuntimeError, match="without a checkpoint"):
            progress.last_checkpoint()
        for step in range(1, 6):
            progress.checkpoint_when_due(step, FileWorkers())
        last = progress.last_checkpoint()
        assert saved(tmp_path) == [2, 4, 5]
        text = (last / "state.txt").read_text(encoding="utf-8")
        assert text == "after step 5"


def test_an_early_end_is_saved_though_no_checkpoint_is_due(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        progress = progress_in(tmp_path, journal)
        progress.checkpoint_when_due(3, FileWorkers())
        assert saved(tmp_path) == []
        progress.checkpoint_when_due(3, FileWorkers(), last=True)
        assert saved(tmp_path) == [3]


def test_values_come_back_to_the_next_attempt_bit_for_bit(tmp_path: Path) -> None:
    values = {"loss_average": 0.1 + 0.2, "smallest": 5e-324}
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        assert progress_in(tmp_path, journal).resume(FileWorkers()).step == 0
        progress = progress_in(tmp_path, journal)
        progress.record(2, 2, {"loss": 1.0}, PhaseClock())
        progress.checkpoint_when_due(2, FileWorkers(), values=values)
        workers = FileWorkers()
        state = progress_in(tmp_path, journal).resume(workers)
    assert (state.step, dict(state.values)) == (2, values)
    assert workers.loaded == "after step 2"
