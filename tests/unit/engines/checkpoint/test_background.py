"""Checkpoints written while training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.checkpoint.background import BackgroundSave, write_in_background
from engines.checkpoint.step_store import StepCheckpoint, StepCheckpoints, TrainerState
from engines.errors import CheckpointError
from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from infra.errors import DeadlineError

Write = Callable[[Path], None]
MakePolicy = Callable[..., tuple[FSDP2Engine, Path]]
BATCH = TokenBatch.from_sequences([[3, 4, 5, 6]], loss_mask=[[0, 1, 1, 1]])


def sft(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


def save(root: Path, world_size: int = 2, timeout_s: float = 600.0) -> BackgroundSave:
    return BackgroundSave(StepCheckpoints(root, 2), 1, TrainerState(1), world_size, timeout_s)


def contents(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def test_training_on_does_not_reach_the_files(make_policy: MakePolicy, tmp_path: Path) -> None:
    engine, _ = make_policy("qwen3")
    expected = tmp_path / "expected"
    expected.mkdir()
    engine.save_checkpoint(expected, step=1)
    running = save(tmp_path / "steps", world_size=1)
    write: list[Callable[[], None]] = []
    paths: list[Path] = []

    def stage(path: Path) -> None:
        paths.append(path)
        write.append(engine.begin_checkpoint(path, step=1))

    running.stage(stage)
    engine.train_batch(BATCH, sft)
    assert not running.done
    write_in_background(write[0], paths[0], 0)
    assert contents(running.result().path) == contents(expected)


def test_it_is_published_when_every_rank_has_written(tmp_path: Path) -> None:
    running, may_write = save(tmp_path), threading.Event()

    def stage(path: Path) -> None:
        for rank in range(2):

            def write(rank: int = rank) -> None:
                assert rank == 0 or may_write.wait(60)
                (path / f"{rank}.txt").write_text("x")

            write_in_background(write, path, rank)

    running.stage(stage)
    assert StepCheckpoints(tmp_path, 2).steps() == []
    may_write.set()
    saved = running.result()
    assert sorted(contents(saved.path)) == ["0.txt", "1.txt"]
    assert StepCheckpoints(tmp_path, 2).latest_valid() == saved


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    running = save(tmp_path)

    def fail() -> None:
        raise OSError("no space left on device")

    def stage(path: Path) -> None:
        write_in_background(lambda: None, path, 0)
        write_in_background(fail, path, 1)

    running.stage(stage)
    with pytest.raises(CheckpointError, match=r"step 1: rank 1 could not write: OSError: no space"):
        running.result()
    assert StepCheckpoints(tmp_path, 2).steps() == []


def test_a_rank_that_never_ends_runs_into_the_deadline(tmp_path: Path) -> None:
    running = save(tmp_path)
    running.stage(lambda path: None)
    running._timeout_s = 0.3
    with pytest.raises(DeadlineError, match="step 1 to be written"):
        running.result()


def test_copying_that_fails_is_raised_at_once(tmp_path: Path) -> None:
    running = save(tmp_path)

    def stage(path: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        running.stage(stage)
    with pytest.raises(ZeroDivisionError):
        running.result()


def test_each_wait_says_what_it_waited_for(tmp_path: Path) -> None:
    class Occupied(StepCheckpoints):
        def save(self, step: int, write: Write, state: TrainerState) -> StepCheckpoint:
            assert may_go_on.wait(60)
            return super().save(step, write, state)

    may_go_on = threading.Event()
    waiting = BackgroundSave(Occupied(tmp_path, 2), 1, TrainerState(1), 1, timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"0\.05 s .* step 1: its directory to be made"):
        waiting.stage(lambda path: None)
    may_go_on.set()
    uncopied = save(tmp_path / "steps", timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"0\.2 s .* step 1: the ranks to copy it"):
        uncopied.result()
