"""What goes to and comes from Ray's job server, typed.

Promises: everything outside `infra.ray.jobs` sees these types and never a raw answer; texts that
Ray gives us are free of known secrets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from infra.redact import redact


class JobState(StrEnum):
    """Ray's states of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class JobRequest(NamedTuple):
    """What to run."""

    argv: Sequence[str]
    """The program by absolute path (`sys.executable`), and its arguments."""
    env: Mapping[str, str]
    """Variables on top of the cluster's environment. Everyone who may list jobs can read them:
    no secrets."""
    metadata: Mapping[str, str]
    """Travels with the job; shown by Ray's own tools."""
    resources: Mapping[str, Any] = {}
    """Keyword arguments of `ray.remote` that reserve what the program itself uses; with none it
    runs on the head node."""


@dataclass(frozen=True)
class JobStatus:
    """What Ray says about a job.

    Attributes:
        submission_id: its name.
        state: one of Ray's states.
        message: Ray's words; for a failed job the tail of its log.
        exit_code: of the entry point, -9 after SIGKILL; None while it runs or if stopped.
        metadata: as submitted.
    """

    submission_id: str
    state: JobState
    message: str
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended."""
        return self.state not in {JobState.PENDING, JobState.RUNNING}


def parse_status(job: Mapping[str, Any]) -> JobStatus:
    """A job as the job server lists it."""
    return JobStatus(
        submission_id=job["submission_id"],
        state=JobState(job["status"]),
        message=redact(job.get("message") or ""),
        exit_code=job.get("driver_exit_code"),
        metadata=dict(job.get("metadata") or {}),
    )
