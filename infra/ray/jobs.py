"""Ray jobs: submit, look, follow, stop.

Promises: a name stands for one job: of any number of callers with the same name exactly one
submits it. Whose answer was lost takes the job of that name for its own.
Does not promise: that Ray's status is the truth about the work. The stage's log is.
"""

import shlex
import socket
import time
from pathlib import Path
from typing import Any

from infra.errors import JobSubmitError
from infra.ray.api import RayApi, RayResponseError, RayUnreachableError
from infra.ray.cluster import Cluster
from infra.ray.job_types import JobRequest, JobStatus, parse_status
from infra.redact import redact
from infra.waiting import wait_for

SUBMIT_DEADLINE_S = 30.0
"""A fresh head refuses jobs until its agent is up; a busy one may drop a connection."""
NO_AGENT = "No available agent"
ALREADY_EXISTS = "already exists"
STOP_DEADLINE_S = 15.0
LOOK_DEADLINE_S = 5.0
"""Whoever follows a job looks every second; a head that is gone must not hold that up."""


class RayJobs:
    """The job server of a cluster.

    Args:
        cluster: where the jobs run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.api = cluster.api
        here = socket.gethostname()
        self.cluster_id = f"{here}:{cluster.home}" if cluster.home else cluster.jobs_url
        """Names the cluster, over restarts of an embedded head."""

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        """Submit one job, unless there is one of that name.

        Args:
            submission_id: names the job; the same name never runs twice on a cluster.
            request: what to run.

        Returns:
            False if the name was taken before.

        Raises:
            JobSubmitError: Ray refused the job or cannot be reached.
        """
        body: dict[str, Any] = {
            "entrypoint": _entrypoint(request),
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
                was_lost |= isinstance(error, RayUnreachableError)
                transient = isinstance(error, RayUnreachableError) or NO_AGENT in error.reason
                if not transient or time.monotonic() >= ends_at:
                    raise
            else:
                return True
            time.sleep(0.2)

    def look(self, submission_id: str) -> JobStatus | None:
        """What Ray says about a job now; None if it knows none of that name."""
        try:
            return parse_status(
                self.api.call("GET", f"/api/jobs/{submission_id}", timeout_s=LOOK_DEADLINE_S)
            )
        except RayResponseError as error:
            if error.status == 404:
                return None
            raise

    def status(self, submission_id: str) -> JobStatus:
        """What Ray says about a job now.

        Args:
            submission_id: of the job.

        Returns:
            Its status.

        Raises:
            JobSubmitError: there is no such job, or Ray cannot be reached.
        """
        status = self.look(submission_id)
        if status is None:
            raise JobSubmitError(f"Ray at {self.api.url} knows no job {submission_id}")
        return status

    def log_tail(self, submission_id: str, num_lines: int = 20) -> str:
        """The last lines the job printed, secrets masked."""
        answer = self.api.call("GET", f"/api/jobs/{submission_id}/logs")
        return "\n".join(redact(str(answer.get("logs", ""))).splitlines()[-num_lines:])

    def stop(self, submission_id: str, deadline_s: float = STOP_DEADLINE_S) -> JobStatus:
        """Stop a job: SIGTERM to its processes, SIGKILL after Ray's grace.

        Args:
            submission_id: of the job.
            deadline_s: how long to wait for its end, in seconds.

        Returns:
            Its last status.

        Raises:
            DeadlineError: it has not ended, as a job that cannot be scheduled does not.
            JobSubmitError: there is no such job, or Ray cannot be reached.
        """
        self.api.call("POST", f"/api/jobs/{submission_id}/stop")

        def ended() -> JobStatus | None:
            status = self.status(submission_id)
            return status if status.is_terminal else None

        return wait_for(ended, f"job {submission_id} to stop", deadline_s)


def num_nodes(api: RayApi) -> int:
    """Machines of a cluster that live.

    Args:
        api: of its head.

    Returns:
        The head counts.

    Raises:
        JobSubmitError: it does not answer, or not in this way.
    """
    answer = api.call("GET", "/nodes?view=summary", timeout_s=LOOK_DEADLINE_S)
    try:
        nodes = [node["raylet"]["state"] for node in answer["data"]["summary"]]
    except (KeyError, TypeError) as error:
        raise JobSubmitError(f"Ray at {api.url} lists its nodes in another form: {error}") from None
    return nodes.count("ALIVE")


def _entrypoint(request: JobRequest) -> str:
    """A shell line that becomes the program, so that its exit code and signals are the job's.

    It works in the caller's directory, if the job's host has it.
    """
    return f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {shlex.join(request.argv)}"
