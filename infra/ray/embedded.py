"""The Ray head that we run ourselves: its files, its command line, its end.

Promises: every server of it listens on loopback; nobody gets an answer without the token, which
stands in a file that only its owner reads; it runs as `ray start --head --block` in a session of
its own and is ended by that session, never by `ray stop`, which ends every Ray of the host.
Does not promise anything about who may start or end it when: `infra.ray.cluster` does.
"""

import hashlib
import logging
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra import env
from infra.errors import JobSubmitError, ServiceError
from infra.host.processes import (
    ProcessIdentity,
    ProcessRecord,
    is_alive,
    own_identity,
    pick_port,
    pick_ports,
    start_detached,
    stop,
)
from infra.host.records import log_tail, save_record
from infra.ray.api import RayApi
from infra.waiting import wait_for

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 12.0
OBJECT_STORE_BYTES = 200_000_000
"""Jobs exchange files and handles, not objects; Ray's own minimum is 75 MB."""
MIN_NUM_CPUS = 4
"""Ray counts CPUs only to admit actors: ranks of a small test share a smaller machine."""

_log = logging.getLogger(__name__)


class RayRecord(BaseModel):
    """`<home>/services/ray.json`: the embedded head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: ProcessRecord
    jobs_url: str
    gcs_address: str
    token_path: Path
    users: tuple[ProcessIdentity, ...]
    """Processes that called `ensure_cluster` and have not released it."""
    persistent: bool
    """Started as a service: it ends with `stop_embedded` only."""


def record_path(home: Path) -> Path:
    """Where the embedded head's record is."""
    return home / "services" / "ray.json"


def open_api(record: RayRecord) -> RayApi:
    """The HTTP client of the head, with its token."""
    return RayApi(record.jobs_url, record.token_path.read_text(encoding="utf-8").strip())


def start_head(
    home: Path, num_cpus: int | None, num_gpus: int | None, *, full_dashboard: bool
) -> RayRecord:
    """Start a head and wait until it answers; called under the lock of the home.

    Args:
        home: where its record, token and log go.
        num_cpus: CPUs that Ray admits actors to.
        num_gpus: GPUs; by default Ray counts them.
        full_dashboard: serve every dashboard page, at port 8265 if it is free.

    Returns:
        Its record, with this process as its only user.

    Raises:
        ServiceError: it ended; carries the tail of its log.
        DeadlineError: it does not answer in time. It is stopped.
    """
    token_path = _token_file(home)
    gcs, *others = pick_ports(8)
    dashboard = pick_port(8265) if full_dashboard else others.pop()
    argv = [
        *(sys.executable, "-m", "ray.scripts.scripts" if full_dashboard else "infra.ray.head"),
        *("start", "--head", "--block", "--no-monitor", "--disable-usage-stats"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", f"--dashboard-port={dashboard}"),
        f"--node-manager-port={others[0]}",
        f"--object-manager-port={others[1]}",
        f"--dashboard-agent-listen-port={others[2]}",
        f"--dashboard-agent-grpc-port={others[3]}",
        f"--runtime-env-agent-port={others[4]}",
        f"--metrics-export-port={others[5]}",
        f"--num-cpus={num_cpus or max(MIN_NUM_CPUS, len(os.sched_getaffinity(0)))}",
        *([] if num_gpus is None else [f"--num-gpus={num_gpus}"]),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={_temp_dir(home)}",
    ]
    process = start_detached(argv, home / "services" / "ray.log", _environment(token_path))
    record = RayRecord(
        process=process,
        jobs_url=f"http://127.0.0.1:{dashboard}",
        gcs_address=f"127.0.0.1:{gcs}",
        token_path=token_path,
        users=(own_identity(),),
        persistent=full_dashboard,
    )
    # Before the wait: if we are killed now, the next run still finds what to clean up.
    save_record(record_path(home), record)
    try:
        wait_until_it_answers(record, START_DEADLINE_S)
    except BaseException:
        stop_head(home, record)
        raise
    return record


def wait_until_it_answers(record: RayRecord, deadline_s: float) -> None:
    """Wait for the job server.

    Args:
        record: of the head.
        deadline_s: in seconds.

    Raises:
        ServiceError: the head ended; carries the tail of its log.
        DeadlineError: it runs and does not answer.
    """
    api = open_api(record)

    def answers() -> bool:
        if not is_alive(record.process):
            log_path = record.process.log_path
            raise ServiceError(f"the embedded Ray head ended; {log_path}:{log_tail(log_path)}")
        try:
            api.version(timeout_s=2.0)
        except JobSubmitError:
            return False
        return True

    wait_for(answers, f"the embedded Ray head at {record.jobs_url}", deadline_s, poll_s=0.05)


def _environment(token_path: Path) -> dict[str, str]:
    """What the head, and so every job on it, inherits; a job's own variables are set per job."""
    environment = env.child_environment(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token_path),
        RAY_AUTH_TOKEN=None,
        RAY_ADDRESS=None,
        RAY_USAGE_STATS_ENABLED="0",
        # Without it GCS, raylet and agents listen on all interfaces, --node-ip-address or not.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",
        RLHF_FAULTS=None,
    )
    # A later run's jobs must not report to the Prefect run that happened to start the head.
    return {k: v for k, v in environment.items() if not k.startswith("PREFECT__")}


def _token_file(home: Path) -> Path:
    """The head's token, made once; mode 0600 from its first byte on."""
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


def _temp_dir(home: Path) -> Path:
    """Ray's sockets live below it, and a socket's path holds 107 bytes at most."""
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"rlhf-ray-{os.getuid()}-{digest}"


def stop_head(home: Path, record: RayRecord) -> None:
    """End a head, its jobs included, and forget it."""
    stop(record.process, STOP_DEADLINE_S)
    record_path(home).unlink(missing_ok=True)
