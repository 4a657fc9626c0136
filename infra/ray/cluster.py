"""The Ray cluster that jobs run on: an existing one by address, or one that we embed.

Promises: an embedded head listens on loopback only and answers nobody without its token (a file
under the home that only its owner reads); two processes that need one at once share one; it ends
with its last user, including users that were killed; a head whose leader died is cleaned up
before the next starts, so no job of it still writes. An existing cluster is never stopped.
Does not promise: that jobs survive their head. The journal and the step checkpoints do.
"""

import importlib.metadata
import logging
from dataclasses import dataclass, field
from pathlib import Path

from infra import env
from infra.errors import ConfigError, DeadlineError, JobSubmitError, ServiceError
from infra.host.processes import is_alive, own_identity
from infra.host.records import file_lock, load_record, save_record
from infra.ray.api import RayApi, RayUnreachableError, existing_token
from infra.ray.embedded import (
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    RayRecord,
    open_api,
    record_path,
    start_head,
    stop_head,
    wait_until_it_answers,
)

UNRESPONSIVE_DEADLINE_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that answers.

    Attributes:
        jobs_url: address of the dashboard and job server.
        gcs_address: `host:port` for `ray.init`; None where only the job server is known.
        started: whether this call started it.
        home: of the embedded head; None for an existing cluster.
        api: the HTTP client, token inside.
    """

    jobs_url: str
    gcs_address: str | None
    started: bool
    home: Path | None
    api: RayApi = field(repr=False)

    def release(self, *, keep_running_jobs: bool = False) -> bool:
        """Say that this process needs the cluster no more; the last user ends an embedded head.

        Args:
            keep_running_jobs: leave the head up if a job runs on it, for a later run to attach.

        Returns:
            Whether the head was stopped.
        """
        if self.home is None:
            return False
        with file_lock(_lock_path(self.home), START_DEADLINE_S):
            record = load_record(record_path(self.home), RayRecord)
            if record is None:
                return False
            me = own_identity()
            users = tuple(u for u in record.users if u != me and is_alive(u))
            save_record(record_path(self.home), record.model_copy(update={"users": users}))
            if users or record.persistent or (keep_running_jobs and self._has_running_job()):
                return False
            stop_head(self.home, record)
            return True

    def _has_running_job(self) -> bool:
        try:
            jobs = self.api.call("GET", "/api/jobs/")
        except JobSubmitError:
            return False
        return any(job["status"] in {"PENDING", "RUNNING"} for job in jobs)


def ensure_cluster(
    home: Path,
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    persistent: bool = False,
) -> Cluster:
    """A cluster that answers: the one at an address, the living embedded one, or a new one.

    Sets Ray's authentication variables for this process, so that Ray's own clients work in it.

    Args:
        home: where the embedded head's record, token and logs are.
        address: `http://host:port` of an existing cluster; default RAY_ADDRESS; neither: embed.
        num_cpus: CPUs of a new embedded head; by default those this process may use.
        num_gpus: GPUs of a new embedded head; by default Ray counts them.
        persistent: a service: it outlives its users and serves the full dashboard.

    Returns:
        The cluster; `release` it when no more jobs are wanted.

    Raises:
        ConfigError: the address is not one, or the cluster refuses our token.
        ServiceError: the cluster does not answer, or the head did not start.
        DeadlineError: the head did not answer in time; what was started is stopped.
    """
    address = address or env.RAY_ADDRESS.get()
    if address:
        return _existing(address)
    home = home.absolute()
    # The lock covers the start: whoever comes second waits, and then finds the record.
    with file_lock(_lock_path(home), START_DEADLINE_S + STOP_DEADLINE_S + UNRESPONSIVE_DEADLINE_S):
        record = _living(home)
        started = record is None
        if record is None:
            record = start_head(home, num_cpus, num_gpus, full_dashboard=persistent)
        me = own_identity()
        users = tuple(u for u in record.users if u != me and is_alive(u))
        record = record.model_copy(
            update={
                "users": users if persistent else (*users, me),
                "persistent": record.persistent or persistent,
            }
        )
        save_record(record_path(home), record)
    env.set_for_process(env.RAY_AUTH_MODE.name, "token")
    env.set_for_process(env.RAY_AUTH_TOKEN_PATH.name, str(record.token_path))
    return Cluster(record.jobs_url, record.gcs_address, started, home, open_api(record))


def stop_embedded(home: Path, *, spare_users: bool = False) -> bool:
    """End the embedded head.

    Args:
        home: of the head.
        spare_users: leave a head that is no service and that a living process uses.

    Returns:
        Whether one was ended.
    """
    with file_lock(_lock_path(home), START_DEADLINE_S):
        record = load_record(record_path(home), RayRecord)
        if record is None:
            return False
        if spare_users and not record.persistent and any(is_alive(u) for u in record.users):
            return False
        stop_head(home, record)
        return True


def _lock_path(home: Path) -> Path:
    return home / "services" / "ray.lock"


def _existing(address: str) -> Cluster:
    api = RayApi(address, existing_token())
    try:
        version = api.version()
    except RayUnreachableError as error:
        raise ServiceError(f"ray.address: {error}") from error
    ours = importlib.metadata.version("ray")
    if version != ours:
        _log.warning("Ray at %s is %s, here it is %s; jobs may not start", address, version, ours)
    return Cluster(api.url, None, False, None, api)


def _living(home: Path) -> RayRecord | None:
    """The embedded head if it answers; a dead or mute one is cleaned up."""
    record = load_record(record_path(home), RayRecord)
    if record is None:
        return None
    if is_alive(record.process) and record.token_path.exists():
        try:
            wait_until_it_answers(record, UNRESPONSIVE_DEADLINE_S)
        except (DeadlineError, ServiceError, ConfigError) as error:
            _log.warning("the embedded Ray head is replaced: %s", error)
        else:
            return record
    # Its jobs may outlive a killed head, in sessions of their own, and still write.
    stop_head(home, record)
    return None
