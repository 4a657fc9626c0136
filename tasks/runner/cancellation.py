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
    """True if a SIGTERM means that the flow run was cancelled.

    Prefect sends the same signal when a worker shuts down; only the state of the flow run on
    the server tells the two apart.

    Returns:
        True if the flow run is cancelled or being cancelled. False outside a flow run, and when
        the server cannot be asked: a job that runs on can be stopped later, a stopped one has
        lost work.
    """
    context = FlowRunContext.get()
    if not isinstance(error, TerminationSignal) or context is None or context.flow_run is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except Exception as failure:  # noqa: BLE001  the process is ending; no answer is an answer
        _log.warning("the state of the flow run is unknown: %s", failure)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def stop_followed(storage: Storage, jobs: RayJobs, follower: str) -> None:
    """End what a cancelled run followed and could not end itself, unless others follow it too.

    Args:
        jobs: of the cluster that runs its jobs.

    Raises:
        JobError: Ray cannot be reached.
    """
    for fingerprint in storage.attempts.followed_by(follower):
        try:
            name = _left_alone(storage, fingerprint, follower)
        except (ArtifactError, OSError) as error:
            # One that cannot be read keeps no other alive.
            _log.warning("%s is not stopped: %s", fingerprint, error)
            continue
        status = jobs.look(name) if name else None
        if name and status is not None and not status.is_terminal:
            jobs.stop(name, STOP_DEADLINE_S)


def _left_alone(storage: Storage, fingerprint: str, follower: str) -> str | None:
    """Stop following a stage; its job is stopped if it has no other follower."""
    log = storage.attempts.entries(fingerprint)
    if storage.attempts.leave(fingerprint, follower) or not log or log[-1].kind != "held":
        return None
    return log[-1].holder.ray_job
