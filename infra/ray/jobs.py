"""Ray jobs: submit, look up, stop.

Promises: a submission id names one job; of several callers with the same id exactly one submits
it. A caller whose answer was lost counts as the submitter if the job exists.
Does not promise: that Ray's status is the truth about the work; the stage's log is.
"""

import shlex
import socket
import time
from pathlib import Path
from typing import Any

from infra.errors import JobSubmitError
from infra.ray.api import (
    JobRequest,
    JobState,
    JobStatus,
    RayApi,
    RayResponseError,
    RayUnreachableError,
)
from infra.ray.cluster import Cluster
from infra.redact import redact
from infra.waiting import wait_for

SUBMIT_DEADLINE_S = 30.0
"""A new head refuses jobs until its agent is up; a busy one may drop a connection."""
NO_AGENT = "No available agent"
ALREADY_EXISTS = "already exists"
STOP_DEADLINE_S = 15.0
LOOK_DEADLINE_S = 5.0
"""Short, because followers poll every second and must not block on a head that is gone."""


class RayJobs:
    """Submits, looks up and stops the jobs of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = cluster.api
        self.cluster_id = (
            f"{socket.gethostname()}:{cluster.home}" if cluster.home else cluster.jobs_url
        )
        """Names the cluster; stable over restarts of an embedded head."""

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        """Submit a job; False if that id existed. JobSubmitError: Ray refuses or is unreachable."""
        cwd = shlex.quote(str(Path.cwd()))
        body: dict[str, Any] = {
            # `exec` keeps the program's exit code and signals. The directory may be absent there.
            "entrypoint": f"cd {cwd} 2>/dev/null; exec {shlex.join(request.argv)}",
            "submission_id": submission_id,
            "metadata": dict(request.metadata),
            "runtime_env": {"env_vars": dict(request.env)},
            **{f"entrypoint_{name}": amount for name, amount in request.resources.items()},
        }
        ends_at, was_lost = time.monotonic() + SUBMIT_DEADLINE_S, False
        while True:
            try:
                self.api.call("POST", "/api/jobs/", body, timeout_s=SUBMIT_DEADLINE_S / 2)
            except (RayResponseError, RayUnreachableError) as error:
                if ALREADY_EXISTS in str(error):
                    return was_lost  # it had arrived
                is_lost = isinstance(error, RayUnreachableError)
                was_lost |= is_lost
                if not (is_lost or NO_AGENT in error.reason) or time.monotonic() >= ends_at:
                    raise
            else:
                return True
            time.sleep(0.2)

    def look(self, submission_id: str) -> JobStatus | None:
        """Return the current status of a job; None if Ray knows no such job."""
        try:
            job = self.api.call("GET", f"/api/jobs/{submission_id}", timeout_s=LOOK_DEADLINE_S)
        except RayResponseError as error:
            if error.status == 404:
                return None
            raise
        return JobStatus(
            submission_id=job["submission_id"],
            state=JobState(job["status"]),
            message=redact(job.get("message") or ""),
            exit_code=job.get("driver_exit_code"),
            metadata=dict(job.get("metadata") or {}),
        )

    def status(self, submission_id: str) -> JobStatus:
        """Return the current status of a job; raises JobSubmitError if Ray knows no such job."""
        status = self.look(submission_id)
        if status is None:
            raise JobSubmitError(f"Ray at {self.api.url} knows no job {submission_id}")
        return status

    def log_tail(self, submission_id: str, num_lines: int = 20) -> str:
        """Return the last lines of a job's output, secrets masked."""
        logs = self.api.call("GET", f"/api/jobs/{submission_id}/logs").get("logs", "")
        return "\n".join(redact(str(logs)).splitlines()[-num_lines:])

    def stop(self, submission_id: str, deadline_s: float = STOP_DEADLINE_S) -> JobStatus:
        """Stop a job (SIGTERM, then SIGKILL after Ray's grace period) and return its last status.

        Raises:
            DeadlineError: the job did not end in `deadline_s`; an unschedulable job never does.
            JobSubmitError: Ray does not answer, or knows no such job.
        """
        self.api.call("POST", f"/api/jobs/{submission_id}/stop")

        def ended() -> JobStatus | None:
            status = self.status(submission_id)
            return status if status.is_terminal else None

        return wait_for(ended, f"job {submission_id} to stop", deadline_s)


def num_nodes(api: RayApi) -> int:
    """Return the number of alive nodes; raises JobSubmitError if the head does not list them."""
    answer = api.call("GET", "/nodes?view=summary", timeout_s=LOOK_DEADLINE_S)
    try:
        nodes = [node["raylet"]["state"] for node in answer["data"]["summary"]]
    except (KeyError, TypeError) as error:
        raise JobSubmitError(
            f"Ray at {api.url} lists its nodes in an unknown form: {error}"
        ) from None
    return nodes.count("ALIVE")
