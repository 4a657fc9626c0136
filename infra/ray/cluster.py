"""The Ray cluster that jobs run on: an existing one, or an embedded head.

Promises: all servers of an embedded head listen on loopback and require its token, a file in the
home that only its owner can read. Processes of one home share the head. It ends with its last user
and its last job, even if users were killed. A head whose main process died is cleaned up, jobs
included, before a new one starts. An existing cluster is never stopped.
Does not promise: that jobs survive their head; journals and step checkpoints do.

A head runs as `ray start --head --block` in its own session and is ended by that session;
`ray stop` would end every Ray of the host.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from infra import env
from infra.errors import ConfigError, DeadlineError, JobSubmitError, ServiceError, on_failure
from infra.faults import fault
from infra.host import servers
from infra.host.ports import answers_ok, pick_port, pick_ports
from infra.host.servers import ServerCommand, ServerRecord
from infra.ray.api import RayApi, RayUnreachableError, existing_token
from infra.waiting import wait_for

NAME = "ray"
JOB_QUEUE_DEADLINE_S = 604_800
"""A job may wait this long for a device that another job holds; Ray's default is 15 minutes."""
OBJECT_STORE_BYTES = 200_000_000
"""Jobs exchange files and handles, not objects; Ray's own minimum is 75 MB."""
MIN_NUM_CPUS = 4
"""Ray uses CPUs only to admit actors; the ranks of a small test may share fewer cores."""
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
        started: True if the call that returned it started an embedded head.
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

        def all_ended() -> bool:
            left[:] = [job for job in unfinished_jobs(self.api) if job not in besides]
            return not left

        def is_busy() -> bool:
            # A job commits before its process exits. If the head does not answer, there is no job
            # to attach to; if the calls fail later, the last known jobs count.
            with contextlib.suppress(DeadlineError, JobSubmitError):
                wait_for(all_ended, "jobs to end", JOB_END_GRACE_S)
            return bool(left)

        stopped = servers.leave(self.home, NAME, is_busy)
        if left:
            _log.warning(
                "%s goes on; its Ray head ends after it. The same command attaches to it, "
                "`rlhf down` stops it",
                ", ".join(left),
            )
        return stopped


def ensure_cluster(
    home: Path,
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    persistent: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> Cluster:
    """Return the cluster at an address, the running embedded one, or a new embedded one.

    For an embedded one, sets Ray's authentication variables in this process, for Ray's own clients.
    The caller releases the cluster.

    Args:
        address: `http://host:port` of an existing cluster; None means RAY_ADDRESS, else embed.
        num_cpus: CPUs of a new embedded head; None means those this process may use, at least 4.
        persistent: keep the head after its last user; a new one serves the full dashboard.
        given_up: polled while a new head starts; True cancels the start.

    Raises:
        ConfigError: the address is invalid, or the cluster refuses the token.
        ServiceError: the cluster does not answer, or the head did not start.
        DeadlineError: a new head did not answer in time; it is stopped.
    """
    address = address or env.RAY_ADDRESS.get()
    if address:
        api = RayApi(address, existing_token())
        try:
            version, ours = api.version(), importlib.metadata.version("ray")
        except RayUnreachableError as error:
            raise ServiceError(f"ray.address: {error}") from error
        if version != ours:
            said = "Ray at %s is %s, here it is %s; jobs may not start"
            _log.warning(said, address, version, ours)
        return Cluster(api.url, None, False, None, api)
    home = home.absolute()
    # Held during the start, so that a second process waits and then finds the record.
    with servers.lock(home, NAME):
        living = _living(home)
        command = partial(head_command, home, num_cpus, full_dashboard=persistent)
        record = living or _start(home, command, persistent, given_up)
        record = servers.join(home, record, persistent=persistent)
    fault("server.ready")
    env.set_for_process(env.RAY_AUTH_MODE.name, "token")
    env.set_for_process(env.RAY_AUTH_TOKEN_PATH.name, str(record.token_path))
    return _cluster(home, record, started=living is None)


def living_cluster(home: Path) -> Cluster | None:
    """Return the cluster that a run of this home would use; None if it would have to start one."""
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
    for remaining in reversed(range(NUM_STARTS)):
        try:
            record = servers.start(home, command(), persistent=persistent)
            with on_failure(lambda _, record=record: servers.stop(home, record)):
                servers.wait_until_ready(record, partial(is_ready, record), given_up=given_up)
                return record
        except (ServiceError, DeadlineError) as error:
            if given_up() or not remaining:
                raise
            said = str(error).partition("\n")[0]
            _log.warning("the Ray head did not start and is started once more: %s", said)
    raise AssertionError


def _living(home: Path) -> ServerRecord | None:
    record = servers.load(home, NAME)
    if record is None:
        return None
    try:
        servers.wait_until_ready(
            record, partial(is_ready, record), deadline_s=UNRESPONSIVE_DEADLINE_S
        )
    except (DeadlineError, ServiceError, ConfigError, OSError) as error:
        _log.warning("the embedded Ray head is replaced: %s", str(error).partition("\n")[0])
        # Jobs run in their own sessions, so they can outlive a killed head and still write.
        servers.stop(home, record)
        return None
    return record


def default_num_cpus() -> int:
    """Return the default number of CPUs of a head."""
    return max(MIN_NUM_CPUS, len(os.sched_getaffinity(0)))


def open_api(record: ServerRecord) -> RayApi:
    """Return an HTTP client of the head, with its token; `ServiceError` if the record has none."""
    if record.token_path is None:
        raise ServiceError(f"the record of {record.name} names no token; remove it")
    return RayApi(record.url, record.token_path.read_text(encoding="utf-8").strip())


def unfinished_jobs(api: RayApi) -> list[str]:
    """Return the names of pending and running jobs, including drivers connected without a job."""
    return [
        job.get("submission_id") or f"driver {job.get('job_id')}"
        for job in api.call("GET", "/api/jobs/")
        if job["status"] in {"PENDING", "RUNNING"}
    ]


def head_command(home: Path, num_cpus: int | None, *, full_dashboard: bool) -> ServerCommand:
    """Return the command that starts a head on free ports; Ray counts the GPUs."""
    token_path = _token_file(home)
    environment = env.child_environment(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token_path),
        RAY_AUTH_TOKEN=None,
        RAY_ADDRESS=None,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_JOB_START_TIMEOUT_SECONDS=str(JOB_QUEUE_DEADLINE_S),
        # Otherwise GCS, raylet and agents listen on all interfaces despite --node-ip-address.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",
    )
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:10]
    gcs, agent, *others = pick_ports(8)
    dashboard = pick_port(8265) if full_dashboard else others.pop()
    argv = (
        *(sys.executable, "-m", "infra.ray.head", str(home), "full" if full_dashboard else "jobs"),
        *("start", "--head", "--block", "--no-monitor", "--disable-usage-stats"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--dashboard-port={dashboard}"),
        f"--node-manager-port={others[0]}",
        f"--object-manager-port={others[1]}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={others[2]}",
        f"--runtime-env-agent-port={others[3]}",
        f"--metrics-export-port={others[4]}",
        f"--num-cpus={num_cpus or default_num_cpus()}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        # Short: Ray puts sockets below it, and a socket path has at most 107 bytes.
        f"--temp-dir={tempfile.gettempdir()}/rlhf-ray-{os.getuid()}-{digest}",
    )
    return ServerCommand(
        name=NAME,
        argv=argv,
        # Jobs of later runs must not report to the Prefect run that started the head.
        environment={k: v for k, v in environment.items() if not k.startswith("PREFECT__")},
        url=f"http://127.0.0.1:{dashboard}",
        # The job agent's check, which includes the raylet: a dashboard alone cannot run jobs.
        health_url=f"http://127.0.0.1:{agent}/api/local_raylet_healthz",
        gcs_address=f"127.0.0.1:{gcs}",
        token_path=token_path,
    )


def is_ready(record: ServerRecord) -> bool:
    """True if a job submitted now would run."""
    if not answers_ok(record.health_url):
        return False
    try:
        open_api(record).version(timeout_s=2.0)
    except JobSubmitError:
        return False
    return True


def _token_file(home: Path) -> Path:
    path = home / "ray_token"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            _log.warning("%s was readable by others; it is private now", path)
            path.chmod(0o600)
        if path.stat().st_size:
            return path
        descriptor = os.open(path, os.O_WRONLY)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return path
