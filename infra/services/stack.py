"""`rlhf up`, `down` and `status`: the four servers of a machine that runs pipelines.

Promises: Prefect server and worker, Ray head and MLflow server listen on 127.0.0.1 only, each in
its own session, keep their data below the home and send no telemetry. `up` leaves running servers
as they are; if one fails to start, those that this call started are ended. `down` ends recorded
servers only, with all their processes, within 30 s. `infra.services.keeper` restarts the worker,
whose flow runs send heartbeats.
Does not promise: to restart another server that dies later; the next `up` does.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path

from infra import env
from infra.errors import ConfigError
from infra.host import servers
from infra.host.ports import answers_ok, online_workers, pick_port
from infra.host.servers import ServerCommand, ServerRecord
from infra.ray.cluster import ensure_cluster, is_ready
from infra.store.process_stamp import is_dead
from infra.store.storage import open_storage

WORK_POOL = "rlhf-pool"
HEARTBEAT_S = 30  # Prefect's minimum
SERVICES = ("prefect", "worker", "mlflow", "ray")
LOCK = "services"
UP_DEADLINE_S = 240.0
PREFECT_PORT = 4200
MLFLOW_PORT = 5000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceStatus:
    """State of a service; `pid` is its first process, `users` are pids of living runs.

    `state` is `up`, `silent` (runs but does not answer), `down` or `starting` (its starter has not
    seen it run, or was killed before).
    """

    name: str
    state: str
    url: str | None = None
    pid: int | None = None
    users: tuple[int, ...] = ()


def up(
    home: Path,
    *,
    prefect_port: int = PREFECT_PORT,
    mlflow_port: int = MLFLOW_PORT,
    deadline_s: float = UP_DEADLINE_S,
) -> list[ServiceStatus]:
    """Start the servers that do not run and wait until all answer; return their states.

    A taken port is replaced by a free one; `deadline_s` holds for each server but Ray.

    Raises:
        ServiceError: a server ended; the text has the tail of its log.
        DeadlineError: a server did not answer in time.
    """
    home = home.absolute()
    with servers.lock(home, LOCK), ExitStack() as undo:
        new = [name for name in SERVICES if servers.running(home, name) is None]
        undo.callback(_end, home, new, spare_users=False)
        undo.callback(_log.warning, "up failed; ending what it started")
        # In parallel, since each loads for seconds; the worker once its server answers.
        prefect = _begin(home, "prefect", lambda: prefect_server(home, pick_port(prefect_port)))
        mlflow = _begin(home, "mlflow", lambda: mlflow_server(home, pick_port(mlflow_port)))
        ensure_cluster(home, persistent=True)
        _wait(prefect, deadline_s)
        worker = _begin(home, "worker", lambda: process_worker(home, prefect.url, mlflow.url))
        _wait(mlflow, deadline_s)
        _wait(worker, deadline_s)
        undo.pop_all()
    return [status_of(home, name) for name in SERVICES]


def down(home: Path) -> tuple[list[str], list[ServiceStatus]]:
    """End every recorded server, even if half-started; one that is not persistent stays while used.

    Return the names of the ended servers and the states of those that stay.
    """
    home = home.absolute()
    with servers.lock(home, LOCK):
        ended = _end(home, servers.recorded(home), spare_users=True)
        return ended, [status_of(home, name) for name in servers.recorded(home)]


def status(home: Path) -> list[ServiceStatus]:
    """Return the states of the four services and of all other servers of a home."""
    home = home.absolute()
    others = [name for name in servers.recorded(home) if name not in SERVICES]
    return [status_of(home, name) for name in (*SERVICES, *others)]


def status_of(home: Path, name: str) -> ServiceStatus:
    """Return the state of one server."""
    record = servers.load(home, name)
    if record is None or (record.process and not record.is_running):
        return ServiceStatus(name, "down")
    pids = tuple(user.pid for user in record.living_users)
    if record.process is None:
        return ServiceStatus(name, "starting", record.url, None, pids)
    state = "up" if _is_healthy(record) else "silent"
    return ServiceStatus(name, state, record.url, record.process.pid, pids)


def held_stages(store: str | Path) -> Iterator[str]:
    """Yield a line for each held stage whose attempt is not known to have ended."""
    storage = open_storage(str(store))
    for fingerprint, stored in storage.inventory.stages().items():
        log, channel = storage.attempts.entries(fingerprint), storage.channel(fingerprint)
        if not log or log[-1].kind == "committed" or channel.read_error(log[-1].number):
            continue
        held, beat = log[-1], channel.read_beat(log[-1].number)
        if is_dead(beat.process if beat else held.holder.process):
            continue
        pids = (f"pid {pid}" for pid in held.holder.process.split(".")[1:2])
        by = " ".join([held.host or "another host", *pids])
        gone = ", which is gone" if is_dead(held.holder.process) else ""
        at = "" if beat is None else f", {beat.phase} step {beat.step or 0}"
        yield (
            f"{fingerprint[:12]} is held by {by} since {held.made_at}{gone}: {held.holder.ray_job}"
            f"{at} (last sign of life {max(0.0, time.time() - stored.work.touched_at):.0f} s ago)"
        )


def running_url(home: Path, name: str) -> str | None:
    """Return the address of a server if it runs, else None; for Prefect, the address of its API."""
    record = servers.running(home, name)
    return None if record is None else record.url


def worker_api_url(home: Path) -> str | None:
    """Return the API address of the worker's Prefect server if the worker is up, else None."""
    worker = status_of(home, "worker")
    return worker.url if worker.state == "up" else None


def tracking_address(home: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the running MLflow server, else a database in the home."""
    database = f"sqlite:///{home / 'mlflow.db'}"
    return env.MLFLOW_TRACKING_URI.get() or running_url(home, "mlflow") or database


def _end(home: Path, names: Sequence[str], *, spare_users: bool) -> list[str]:
    end = partial(servers.end, home, spare_users=spare_users)
    # The worker first: its runs report to the others.
    ended = [name for name in names if name == "worker" and end(name)]
    others = [name for name in names if name != "worker"]
    with ThreadPoolExecutor() as threads:
        return ended + list(compress(others, threads.map(end, others)))


def _wait(record: ServerRecord, deadline_s: float) -> None:
    servers.wait_until_ready(record, lambda: _is_healthy(record), deadline_s=deadline_s)


def _begin(home: Path, name: str, make_command: Callable[[], ServerCommand]) -> ServerRecord:
    with servers.lock(home, name):
        record = servers.load(home, name)
        if record is not None:
            if record.is_running:
                return record
            servers.stop(home, record)
        return servers.start(home, make_command(), persistent=True)


def _is_healthy(record: ServerRecord) -> bool:
    if record.name == "worker":
        return online_workers(record.url, WORK_POOL) > 0
    if record.token_path is None:
        return answers_ok(record.health_url)
    try:
        return is_ready(record)
    except (ConfigError, OSError):
        return False


def prefect_server(home: Path, port: int) -> ServerCommand:
    """Return the command of the Prefect server; its database is `<home>/prefect/prefect.db`."""
    url = f"http://127.0.0.1:{port}/api"
    return ServerCommand(
        name="prefect",
        argv=(
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ),
        environment=env.child_environment(
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=url,
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            # In memory, a restarted server would lose the slots and end the runs that hold them.
            PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=(
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def mlflow_server(home: Path, port: int) -> ServerCommand:
    """Return the command of the MLflow server; runs without a server write to the same database."""
    url = f"http://127.0.0.1:{port}"
    return ServerCommand(
        name="mlflow",
        argv=(
            *(sys.executable, "-m", "infra.tracking.mlflow_database", str(home / "mlflow.db")),
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"),
            *("--artifacts-destination", str(home / "mlflow-artifacts")),
        ),
        environment=env.child_environment(
            # The job runner and queue consumers take 0.65 GB and are not used here.
            MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
            MLFLOW_DISABLE_TELEMETRY="true",
            MLFLOW_TRACKING_URI=None,
            DO_NOT_TRACK="1",
        ),
        url=url,
        health_url=f"{url}/health",
    )


def process_worker(home: Path, prefect_url: str, mlflow_url: str) -> ServerCommand:
    """Return the command of the Prefect worker, which creates its work pool if it is missing."""
    return ServerCommand(
        name="worker",
        argv=(
            *(sys.executable, "-m", "infra.services.keeper"),
            *(sys.executable, "-m", "prefect", "--no-prompt", "worker", "start"),
            *("--pool", WORK_POOL, "--type", "process", "--name", f"worker-{home.name}"),
        ),
        environment=env.child_environment(
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=prefect_url,
            # Prefect's own default is pickle.
            PREFECT_RESULTS_DEFAULT_SERIALIZER="json",
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY=str(HEARTBEAT_S),
            MLFLOW_TRACKING_URI=mlflow_url,
            RLHF_HOME=str(home),
            DO_NOT_TRACK="1",
        ),
        url=prefect_url,
    )
