"""Classifies why a job failed: memory, disk, a dead or hanging rank, NaN.

Promises: the error's own text is always in the message. Does not know the peak memory of ranks,
only that of this process and its children.
"""

import errno
import re
import resource
import shutil
from pathlib import Path

from engines.errors import NonFiniteError, WorkerError
from engines.trainers.step_timer import PHASE_NOTE
from infra.errors import DeadlineError
from infra.redact import redact
from infra.store.work_channel import Cause, JobProblem
from infra.waiting import FULL_DISK, ROOM

_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|\bMemoryError\b", re.I)


def job_problem(error: BaseException, exit_code: int) -> JobProblem:
    """Return what a failed job reports: cause, phase and measured sizes."""
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
    """Return the innermost phase noted in an error; empty if none was noted."""
    notes = getattr(error, "__notes__", ())
    return next((n.removeprefix(PHASE_NOTE) for n in notes if n.startswith(PHASE_NOTE)), "")


def _cause(error: BaseException | None) -> Cause:
    while error is not None:
        waited_for = error.waited_for if isinstance(error, DeadlineError) else ""
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        if is_full or waited_for.startswith(ROOM):
            return "disk_full"
        if isinstance(error, NonFiniteError):
            return "non_finite"
        # Also by text: each device library has its own error class; a rank's error is text.
        says_so = isinstance(error, RuntimeError | WorkerError) and _MEMORY.search(str(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM or says_so:
            return "out_of_memory"
        if isinstance(error, WorkerError):
            return "hang" if "no heartbeat" in str(error) else "dead_rank"
        if re.search(r" on rank \d", waited_for):
            return "hang"
        error = error.__cause__
    return ""


def _free(error: BaseException) -> str:
    """Return a text about the free space of the disk of the error's file, if known."""
    named = getattr(error, "filename", None)
    place = next((p for p in Path(str(named)).parents if p.exists()), None) if named else None
    return f"; {shutil.disk_usage(place).free:,} bytes are free at {place}" if place else ""
