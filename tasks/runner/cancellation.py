"""Detects a cancelled flow run, and stops its jobs."""

import logging

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal

from infra.errors import ArtifactError
from infra.ray.jobs import RayJobs
from infra.store.storage import Storage

STOP_DEADLINE_S = 20.0

_log = logging.getLogger(__name__)


def run_is_cancelled(error: BaseException) -> bool:
    """Return True if a SIGTERM means that the flow run was cancelled.

    A worker that shuts down sends the same signal; only the flow run's state on the server tells
    the two apart. If it is unknown, the result is False, because a running job can still be stopped
    later.
    """
    context = FlowRunContext.get()
    if not isinstance(error, TerminationSignal) or context is None or context.flow_run is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except Exception as failure:  # noqa: BLE001  the process is ending
        _log.warning("the state of the flow run is unknown: %s", failure)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def stop_followed(storage: Storage, jobs: RayJobs, follower: str) -> None:
    """Stop the jobs that a cancelled run followed, unless they have other followers.

    Raises:
        JobError: Ray cannot be reached.
    """
    for fingerprint in storage.attempts.followed_by(follower):
        try:
            name = _left_alone(storage, fingerprint, follower)
        except (ArtifactError, OSError) as error:
            # An unreadable log must not keep other jobs alive.
            _log.warning("%s is not stopped: %s", fingerprint, error)
            continue
        status = jobs.look(name) if name else None
        if name and status is not None and not status.is_terminal:
            jobs.stop(name, STOP_DEADLINE_S)


def _left_alone(storage: Storage, fingerprint: str, follower: str) -> str | None:
    """Stop following a stage; return its job if that has no other follower."""
    log = storage.attempts.entries(fingerprint)
    if storage.attempts.leave(fingerprint, follower) or not log or log[-1].kind != "held":
        return None
    return log[-1].holder.ray_job
