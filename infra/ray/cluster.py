"""The Ray cluster that jobs run on: an existing one, or an embedded head.

Promises: an embedded head listens on loopback only and requires its token, a file in the home that
only its owner can read. Processes of one home share it. It ends with its last user and its last
job, even if users were killed. A head whose main process died is cleaned up, jobs included, before
a new one starts. An existing cluster is never stopped.
Does not promise: that jobs survive their head; journals and step checkpoints do.
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
"""How long a living head may not answer under load before it is replaced, which ends its jobs."""
JOB_END_GRACE_S = 3.0
NUM_STARTS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that answers.

    Attributes:
        gcs_address: `host:port` for `ray.init`; None if only the job server is known.
        started: True if this call started it.
        home: home of the embedded head; None for an existing cluster.
    """

    jobs_url: str
    gcs_address: str | None
    started: bool
    home: Path | None
    api: RayApi = field(repr=False)

    def release(self, besides: Collection[str] = ()) -> bool:
        """Stop using the cluster; the last user stops an embedded head. True if it was stopped.

        A head with a running job, other than those in `besides`, is kept: a later run attaches to
        the job, and the head ends after it.
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
        """Return the jobs that still run after a grace: a job commits before its process exits."""
        left: list[str] = []

        def all_ended() -> bool:
            left[:] = [job for job in unfinished_jobs(self.api) if job not in besides]
            return not left

        # If the head does not answer, there is no job to attach to. If the calls fail later, the
        # last known jobs count.
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
    """Return the cluster at an address, the running embedded one, or a new embedded one.

    Sets Ray's authentication variables in this process, so that Ray's own clients work in it. The
    caller releases the cluster.

    Args:
        address: `http://host:port` of an existing cluster; None means RAY_ADDRESS, else embed.
        num_cpus: CPUs of a new embedded head; None means those this process may use, at least 4.
        num_gpus: GPUs of a new embedded head; None lets Ray count them.
        persistent: keep the head after its last user; a new one serves the full dashboard.
        given_up: polled while a new head starts; True cancels the start.

    Raises:
        ConfigError: the address is invalid, or the cluster refuses the token.
        ServiceError: the cluster does not answer, or the head did not start.
        DeadlineError: a new head did not answer in time; it is stopped.
    """
    address = address or env.RAY_ADDRESS.get()
    if address:
        return _existing(address)
    home = home.absolute()
    # Held during the start, so that a second process waits and then finds the record.
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
    """Return the cluster that a run of this home would use now; starts none."""
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
    # The raylet exits at start if a chosen port was taken before its use, or if its agent takes
    # more than about 30 s to load on a busy machine.
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
    record = servers.load(home, NAME)
    if record is None:
        return None
    try:
        servers.wait_until_ready(
            record, lambda: is_ready(record), deadline_s=UNRESPONSIVE_DEADLINE_S
        )
    except (DeadlineError, ServiceError, ConfigError, OSError) as error:
        _log.warning("the embedded Ray head is replaced: %s", str(error).partition("\n")[0])
        # Jobs run in their own sessions, so they can outlive a killed head and still write.
        servers.stop(home, record)
        return None
    return record
