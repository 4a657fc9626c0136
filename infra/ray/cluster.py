"""The Ray cluster that jobs run on: an existing one by address, or one that we embed.

Promises: an embedded head listens on loopback only and answers nobody without its token (a file
under the home that only its owner reads); two processes that need one at once share one; it ends
with its last user and its last job, including users that were killed; a head that is returned
could run a job now; a head whose leader died is cleaned up before the next starts, so no job of
it still writes. An existing cluster is never stopped.
Does not promise: that jobs survive their head. The journal and the step checkpoints do.
"""

import contextlib
import functools
import importlib.metadata
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from infra import env
from infra.errors import ConfigError, DeadlineError, JobSubmitError, ServiceError
from infra.faults import fault
from infra.host import servers
from infra.host.servers import ServerCommand, ServerRecord
from infra.ray.api import RayApi, RayUnreachableError, existing_token
from infra.ray.embedded import NAME, head_command, is_ready, open_api, unfinished_jobs
from infra.waiting import wait_for

UNRESPONSIVE_DEADLINE_S = 60.0
"""A head whose leader runs may be mute so long where load is high; replacing it ends its jobs."""
JOB_END_GRACE_S = 3.0
NUM_STARTS = 3

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

    def release(self, besides: Collection[str] = ()) -> bool:
        """Say that this process needs the cluster no more; the last user ends an embedded head.

        A head on which a job still runs stays for it: a later run attaches, and the head ends
        with its last job.

        Args:
            besides: names of jobs that do not keep the head: they were stopped, or should be.

        Returns:
            Whether the head was stopped.
        """
        if self.home is None:
            return False
        left: list[str] = []

        def is_busy() -> bool:
            left.extend(self._jobs_that_go_on(besides))
            return bool(left)

        stopped = servers.leave(self.home, NAME, is_busy)
        if left:
            _log.warning(
                "%s goes on; its Ray head ends after it. The same command attaches to it, "
                "`rlhf down` stops it",
                ", ".join(left),
            )
        return stopped

    def _jobs_that_go_on(self, besides: Collection[str]) -> list[str]:
        """Jobs that are not about to end: a job commits before its process is gone."""
        left: list[str] = []

        def all_ended() -> bool:
            left[:] = [job for job in unfinished_jobs(self.api) if job not in besides]
            return not left

        # A head that does not answer runs nothing that could be attached to; an API that says
        # nothing useful within the time leaves the jobs it named.
        with contextlib.suppress(DeadlineError, JobSubmitError):
            wait_for(all_ended, "jobs to end", JOB_END_GRACE_S)
        return left


def ensure_cluster(
    home: Path,
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    persistent: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> Cluster:
    """A cluster that answers: the one at an address, the living embedded one, or a new one.

    Sets Ray's authentication variables for this process, so that Ray's own clients work in it.

    Args:
        home: where the embedded head's record, token and logs are.
        address: `http://host:port` of an existing cluster; default RAY_ADDRESS; neither: embed.
        num_cpus: CPUs of a new embedded head; by default those this process may use.
        num_gpus: GPUs of a new embedded head; by default Ray counts them.
        persistent: a service: it outlives its users and serves the full dashboard.
        given_up: asked while a new head starts: whether nobody wants it any more.

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
    with servers.lock(home, NAME):
        record = _living(home)
        started = record is None
        if record is None:
            command = functools.partial(
                head_command, home, num_cpus, num_gpus, full_dashboard=persistent
            )
            record = _start(home, command, persistent, given_up)
        record = servers.join(home, record, persistent=persistent)
    fault("server.ready")
    env.set_for_process(env.RAY_AUTH_MODE.name, "token")
    env.set_for_process(env.RAY_AUTH_TOKEN_PATH.name, str(record.token_path))
    return _cluster(home, record, started)


def living_cluster(home: Path) -> Cluster | None:
    """The cluster that a run of this home would find now; starts none.

    Args:
        home: of the run.

    Returns:
        The cluster, or None.
    """
    if env.RAY_ADDRESS.get():
        return ensure_cluster(home)
    record = servers.running(home, NAME)
    return None if record is None else _cluster(home, record, started=False)


def _cluster(home: Path, record: ServerRecord, started: bool) -> Cluster:
    return Cluster(record.url, record.gcs_address, started, home, open_api(record))


def _start(
    home: Path,
    command: Callable[[], ServerCommand],
    persistent: bool,
    given_up: Callable[[], bool],
) -> ServerRecord:
    """A new head that can take jobs.

    Ray's raylet ends at its start if a port was lost between its choice and its use, or if its
    agent takes more than some 30 s to load, as on a machine that is busy.
    """
    for _ in range(NUM_STARTS - 1):
        try:
            return _start_once(home, command(), persistent, given_up)
        except (ServiceError, DeadlineError) as error:
            if given_up():
                raise
            reason = str(error).partition("\n")[0]
            _log.warning("the Ray head did not start and is started once more: %s", reason)
    return _start_once(home, command(), persistent, given_up)


def _start_once(
    home: Path, command: ServerCommand, persistent: bool, given_up: Callable[[], bool]
) -> ServerRecord:
    record = servers.start(home, command, persistent=persistent)
    try:
        servers.wait_until_ready(record, lambda: is_ready(record), given_up=given_up)
    except BaseException:
        servers.stop(home, record)
        raise
    return record


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


def _living(home: Path) -> ServerRecord | None:
    """The embedded head if it can take jobs; a dead or mute one is cleaned up."""
    record = servers.load(home, NAME)
    if record is None:
        return None
    try:
        servers.wait_until_ready(
            record, lambda: is_ready(record), deadline_s=UNRESPONSIVE_DEADLINE_S
        )
    except (DeadlineError, ServiceError, ConfigError, OSError) as error:
        _log.warning("the embedded Ray head is replaced: %s", str(error).partition("\n")[0])
        # Its jobs may outlive a killed head, in sessions of their own, and still write.
        servers.stop(home, record)
        return None
    return record
