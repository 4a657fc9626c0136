"""Write step checkpoints while training continues.

Each rank copies its state to host memory, writes the copy in its own thread and then creates a
marker file; a thread of the publishing process waits for all markers. Training goes on after
the copy. The next checkpoint reuses the memory of the copy (`StagingBuffers`), since fresh memory,
which the operating system provides page by page, costs more than the copying.
Promises: a checkpoint appears only when every rank has written its part; an error in the background
is raised by `stage` or `result`. A buffer has one user at a time. Expects one save in flight.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines import remote_files
from engines.checkpoint.step_store import StepCheckpoint, StepCheckpoints, TrainerState
from engines.errors import CheckpointError
from infra.waiting import in_thread, result_within, wait_for

_WRITTEN, _FAILED = ".written-", ".failed-"
_POLL_S = 0.05


def write_in_background(write: Callable[[], None], path: Path, rank: int) -> None:
    """Call `write`, which writes a rank's staged files, in a new thread.

    At its end `.written-<rank>` or `.failed-<rank>` is in `path`, which is on the driver's disk.
    """
    disk = remote_files.current()

    def leave_marker(written: Future[None]) -> None:
        error = written.exception()
        if error is None:
            disk.put(path / f"{_WRITTEN}{rank}", b"")
        else:
            disk.put(path / f"{_FAILED}{rank}", f"{type(error).__name__}: {error}".encode())

    in_thread(write, f"checkpoint-rank-{rank}").add_done_callback(leave_marker)


class BackgroundSave:
    """Publishes one checkpoint in the background, once `world_size` ranks have written it."""

    def __init__(
        self,
        checkpoints: StepCheckpoints,
        step: int,
        state: TrainerState,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self._step, self._world_size, self._timeout_s = step, world_size, timeout_s
        self._staged: Future[None] = Future()
        self._directory: Future[Path] = Future()
        self._result: Future[StepCheckpoint] = in_thread(
            partial(checkpoints.save, step, self._when_written, state), f"publish-step-{step}"
        )
        self._result.add_done_callback(self._end_without_directory)

    def stage(self, stage: Callable[[Path], None]) -> None:
        """Call `stage` with the directory; it returns when the ranks have copied their state.

        Raises DeadlineError if the directory is not made in time, or what `save` or `stage` raise.
        """
        with ExitStack() as stack:
            stack.push(self._end_staging)
            what = f"step {self._step}: its directory to be made"
            stage(result_within(self._directory, what, self._timeout_s))

    def _end_staging(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._staged.set_result(None)
        else:
            self._staged.set_exception(error)

    @property
    def done(self) -> bool:
        """True if the checkpoint was published or failed."""
        return self._result.done()

    def result(self) -> StepCheckpoint:
        """Wait for the published checkpoint and return it.

        Raises:
            CheckpointError: a rank could not write.
            DeadlineError: the disk had no room, or the ranks did not finish, in time.
            PipelineError, OSError: as `StepCheckpoints.save`; or `stage` failed.
        """
        what = f"step {self._step} to be published"
        return result_within(self._result, what, 2 * self._timeout_s)

    def _end_without_directory(self, saved: Future[StepCheckpoint]) -> None:
        if not self._directory.done():
            self._directory.set_exception(saved.exception())

    def _when_written(self, path: Path) -> None:
        self._directory.set_result(path)
        what = f"step {self._step}: the ranks to copy it"
        result_within(self._staged, what, self._timeout_s)
        ranks = range(self._world_size)

        def finished() -> bool:
            failed = sorted(path.glob(f"{_FAILED}*"))
            if failed:
                raise CheckpointError(
                    f"step {self._step}: rank {failed[0].name.removeprefix(_FAILED)} could not "
                    f"write: {failed[0].read_text()}"
                )
            return all((path / f"{_WRITTEN}{rank}").exists() for rank in ranks)

        wait_for(finished, f"step {self._step} to be written", self._timeout_s, _POLL_S)
        for rank in ranks:
            (path / f"{_WRITTEN}{rank}").unlink()


class StagingBuffers:
    """Reusable host buffers by key, each lent to one user; pinned for values of an accelerator."""

    def __init__(self) -> None:
        self._free: dict[object, Tensor] = {}

    def copy(self, key: object, value: Tensor) -> Tensor:
        """Return a contiguous CPU copy, lent until `give_back`; each tensor has its own `key`."""
        # pop is atomic, so that no other thread can take the same buffer.
        buffer = self._free.pop(key, None)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(
                value.shape, dtype=value.dtype, pin_memory=value.device.type != "cpu"
            )
        return buffer.copy_(value)

    def give_back(self, key: object, buffer: Tensor) -> None:
        """Return a buffer that `copy` lent under this key; it must not be read any more."""
        self._free[key] = buffer
