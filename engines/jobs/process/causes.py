"""Why a job failed, in words that say what to do: memory, disk, a rank that died or hangs, NaN.

Promises: whatever it was, the error's own text is in the message.
Does not promise to know a rank's peak of memory: it is told of this process and its children.
"""

import errno
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from engines.errors import NonFiniteError, WorkerError
from engines.trainers.loop.phases import PHASE_NOTE
from infra.errors import DeadlineError
from infra.redact import redact
from infra.store.work_channel import Cause, JobProblem
from infra.waiting import FULL_DISK, ROOM

_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|\bMemoryError\b", re.I)
_RANK_IS_LATE = re.compile(r" on rank \d")


def job_problem(error: BaseException, exit_code: int) -> JobProblem:
    """What a job leaves about its end.

    Args:
        error: that ended it.
        exit_code: of its process.

    Returns:
        The problem; its message names cause, phase and the figures that there are.
    """
    cause, phase, said = _cause(error), phase_of(error), redact(str(error))
    at = f" in phase {phase}" if phase else ""
    if cause == "out_of_memory":
        own, children = (
            resource.getrusage(who).ru_maxrss * 1024
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        said = (
            f"out of memory{at}: {said or type(error).__name__}; at its peak this process held "
            f"{own:,} bytes, the largest of its children {children:,}"
        )
    elif cause == "disk_full":
        said = f"disk full{at}: {said}{_free(error)}; free space there, then run again to resume"
    return JobProblem(
        type=type(error).__name__, message=said, exit_code=exit_code, cause=cause, phase=phase
    )


def phase_of(error: BaseException) -> str:
    """The innermost phase that an error was raised in; empty where none was noted."""
    notes = getattr(error, "__notes__", ())
    return next((n.removeprefix(PHASE_NOTE) for n in notes if n.startswith(PHASE_NOTE)), "")


def _cause(error: BaseException) -> Cause:
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in FULL_DISK:
            return "disk_full"
        if isinstance(each, DeadlineError) and each.waited_for.startswith(ROOM):
            return "disk_full"
        if isinstance(each, NonFiniteError):
            return "non_finite"
        # By words, too: each device's library has an error of its own, and a rank's comes as text.
        if isinstance(each, MemoryError) or getattr(each, "errno", None) == errno.ENOMEM:
            return "out_of_memory"
        if isinstance(each, RuntimeError | WorkerError) and _MEMORY.search(str(each)):
            return "out_of_memory"
        if isinstance(each, WorkerError):
            return "hang" if "no heartbeat" in str(each) else "dead_rank"
        if isinstance(each, DeadlineError) and _RANK_IS_LATE.search(each.waited_for):
            return "hang"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _free(error: BaseException) -> str:
    """How much room the disk has now, where the error says which one."""
    named = getattr(error, "filename", None)
    place = next((p for p in Path(str(named)).parents if p.exists()), None) if named else None
    return f"; {shutil.disk_usage(place).free:,} bytes are free at {place}" if place else ""
