"""The embedded Ray head: its files, its command line, its readiness.

Promises: all its servers listen on loopback and require the token, a file that only its owner can
read. It runs as `ray start --head --block` in its own session and is ended by that session;
`ray stop` would end every Ray of the host. `infra.ray.cluster` decides when it starts and ends.
"""

import hashlib
import logging
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

from infra import env
from infra.errors import JobSubmitError, ServiceError
from infra.host.ports import answers_ok, pick_port, pick_ports
from infra.host.servers import ServerCommand, ServerRecord
from infra.ray.api import RayApi

NAME = "ray"
JOB_QUEUE_DEADLINE_S = 604_800
"""A job may wait this long for a device that another job holds; Ray's default is 15 minutes."""
OBJECT_STORE_BYTES = 200_000_000
"""Jobs exchange files and handles, not objects; Ray's own minimum is 75 MB."""
MIN_NUM_CPUS = 4
"""Ray uses CPUs only to admit actors; the ranks of a small test may share fewer cores."""

_log = logging.getLogger(__name__)


def default_num_cpus() -> int:
    """Return the default number of CPUs of a head."""
    return max(MIN_NUM_CPUS, len(os.sched_getaffinity(0)))


def open_api(record: ServerRecord) -> RayApi:
    """Return an HTTP client of the head, with its token."""
    if record.token_path is None:
        raise ServiceError(f"the record of {record.name} names no token; remove it")
    return RayApi(record.url, record.token_path.read_text(encoding="utf-8").strip())


def unfinished_jobs(api: RayApi) -> list[str]:
    """Return the names of pending and running jobs, including drivers connected without a job."""
    jobs = api.call("GET", "/api/jobs/")
    return [
        job.get("submission_id") or f"driver {job.get('job_id')}"
        for job in jobs
        if job["status"] in {"PENDING", "RUNNING"}
    ]


def head_command(
    home: Path, num_cpus: int | None, num_gpus: int | None, *, full_dashboard: bool
) -> ServerCommand:
    """Return the command that starts a head on free ports; `num_gpus` None lets Ray count them."""
    token_path = _token_file(home)
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
        *([] if num_gpus is None else [f"--num-gpus={num_gpus}"]),
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={_temp_dir(home)}",
    )
    return ServerCommand(
        name=NAME,
        argv=argv,
        environment=_environment(token_path),
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


def _environment(token_path: Path) -> dict[str, str]:
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
    # Jobs of later runs must not report to the Prefect run that started the head.
    return {k: v for k, v in environment.items() if not k.startswith("PREFECT__")}


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


def _temp_dir(home: Path) -> Path:
    """Return a short path: Ray puts sockets below it, and a socket path has at most 107 bytes."""
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"rlhf-ray-{os.getuid()}-{digest}"
