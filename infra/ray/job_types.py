"""Typed requests to and answers from Ray's job server; texts from Ray are redacted."""

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
    """A job to submit."""

    argv: Sequence[str]
    """Absolute path of the program (`sys.executable`), and its arguments."""
    env: Mapping[str, str]
    """Variables added to the cluster's environment. No secrets: everyone who may list jobs can read
    them."""
    metadata: Mapping[str, str]
    """Stored with the job and shown by Ray's tools."""
    resources: Mapping[str, Any] = {}
    """`ray.remote` arguments that reserve resources; if empty, it runs on the head node."""


@dataclass(frozen=True)
class JobStatus:
    """Ray's record of a job; for a failed job the message is the tail of its log.

    `exit_code` is that of the entry point, -9 after SIGKILL; None while it runs or if stopped.
    """

    submission_id: str
    state: JobState
    message: str
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def is_terminal(self) -> bool:
        """True if the job has ended."""
        return self.state not in {JobState.PENDING, JobState.RUNNING}


def parse_status(job: Mapping[str, Any]) -> JobStatus:
    """Convert a job server entry to a `JobStatus`."""
    return JobStatus(
        submission_id=job["submission_id"],
        state=JobState(job["status"]),
        message=redact(job.get("message") or ""),
        exit_code=job.get("driver_exit_code"),
        metadata=dict(job.get("metadata") or {}),
    )
