"""`rlhf up`, `down` and `status`: the four servers of a machine that runs pipelines.

Promises: Prefect server, its worker, Ray head and MLflow server listen on loopback, each in a
session of its own; what answers already is left as it is; if one of them does not start, those
that this call started are ended again; `down` ends exactly the recorded ones with everything
they started, within 30 s, and twice is as good as once.
Does not promise: to restart a server that dies later. `up` does, when it is called again.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra.errors import ConfigError, JobSubmitError, ServiceError
from infra.host.loopback_http import answers_ok, online_workers
from infra.host.processes import ProcessRecord, is_alive, pick_port, start_detached, stop_all
from infra.host.records import file_lock, load_record, log_tail, save_record
from infra.ray.cluster import ensure_cluster, stop_embedded
from infra.ray.embedded import RayRecord, open_api, record_path
from infra.services.commands import (
    WORK_POOL,
    ServerCommand,
    mlflow_server,
    prefect_server,
    process_worker,
)
from infra.waiting import wait_for

UP_DEADLINE_S = 120.0
DOWN_DEADLINE_S = 14.0
"""Twice this, for the Ray head and for the rest, is less than the promised 30 s."""
PREFECT_PORT = 4200
MLFLOW_PORT = 5000

_log = logging.getLogger(__name__)


class ServiceRecord(BaseModel):
    """`<home>/services/<name>.json`: a server that `up` started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: ProcessRecord
    url: str


@dataclass(frozen=True)
class ServiceStatus:
    """What is known of a service.

    Attributes:
        name: `prefect`, `worker`, `ray` or `mlflow`.
        state: `up`, `silent` (it runs and does not answer) or `down`.
        url: where it answers, or would.
        pid: of its first process.
    """

    name: str
    state: str
    url: str | None = None
    pid: int | None = None


def up(
    home: Path,
    *,
    prefect_port: int = PREFECT_PORT,
    mlflow_port: int = MLFLOW_PORT,
    deadline_s: float = UP_DEADLINE_S,
) -> list[ServiceStatus]:
    """Start what does not run yet and wait until all of it answers.

    Args:
        home: where records, logs and databases go.
        prefect_port: if it is taken, another one is used.
        mlflow_port: if it is taken, another one is used.
        deadline_s: for each of the four, in seconds.

    Returns:
        The state of each.

    Raises:
        ServiceError: one ended; carries the tail of its log.
        DeadlineError: one does not answer in time.
    """
    home = home.absolute()
    with file_lock(_lock_path(home), 2 * deadline_s):
        started: list[str] = []
        try:
            _start_all(home, prefect_port, mlflow_port, deadline_s, started)
        except BaseException:
            _log.warning("up failed; ending what it started: %s", ", ".join(started) or "nothing")
            _stop_servers(home, started)
            if "ray" in started:
                stop_embedded(home)
            raise
    return status(home)


def down(home: Path) -> list[str]:
    """End the services of a home; the names of those that there were."""
    home = home.absolute()
    with file_lock(_lock_path(home), UP_DEADLINE_S):
        # The worker first: its flow runs would report to a server that is gone.
        ended = _stop_servers(home, ["worker", "prefect", "mlflow"])
        if stop_embedded(home, spare_users=True):
            ended.append("ray")
    return ended


def status(home: Path) -> list[ServiceStatus]:
    """What runs and what answers, in the order of their start."""
    home = home.absolute()
    found = [
        _status_of(home, "prefect", lambda url: answers_ok(f"{url}/health")),
        _status_of(home, "worker", lambda url: online_workers(url, WORK_POOL) > 0),
        _status_of(home, "mlflow", lambda url: answers_ok(f"{url}/health")),
    ]
    ray = load_record(record_path(home), RayRecord)
    if ray is None or not is_alive(ray.process):
        return [*found, ServiceStatus("ray", "down")]
    try:
        open_api(ray).version(timeout_s=2.0)
        state = "up"
    except (JobSubmitError, ConfigError):
        state = "silent"
    return [*found, ServiceStatus("ray", state, ray.jobs_url, ray.process.pid)]


def running_prefect_url(home: Path) -> str | None:
    """API address of the Prefect server that `up` started, if it runs."""
    return _running_url(home, "prefect")


def running_mlflow_url(home: Path) -> str | None:
    """Address of the MLflow server that `up` started, if it runs."""
    return _running_url(home, "mlflow")


def _start_all(
    home: Path, prefect_port: int, mlflow_port: int, deadline_s: float, started: list[str]
) -> None:
    """All at once, since each loads for many seconds; the worker when its server answers."""
    prefect = _begin(
        home, "prefect", lambda: prefect_server(home, pick_port(prefect_port)), started
    )
    mlflow = _begin(home, "mlflow", lambda: mlflow_server(home, pick_port(mlflow_port)), started)
    if ensure_cluster(home, persistent=True).started:
        started.append("ray")
    _wait_until("prefect", prefect, lambda: answers_ok(f"{prefect.url}/health"), deadline_s)
    worker = _begin(home, "worker", lambda: process_worker(home, prefect.url, mlflow.url), started)
    _wait_until("mlflow", mlflow, lambda: answers_ok(f"{mlflow.url}/health"), deadline_s)
    _wait_until("worker", worker, lambda: online_workers(prefect.url, WORK_POOL) > 0, deadline_s)


def _begin(
    home: Path, name: str, make_command: Callable[[], ServerCommand], started: list[str]
) -> ServiceRecord:
    """The living server, or a new one that does not answer yet."""
    record = load_record(_record_path(home, name), ServiceRecord)
    if record is not None and is_alive(record.process):
        return record
    if record is not None:
        stop_all([record.process], DOWN_DEADLINE_S)
    command = make_command()
    log_path = home / "logs" / f"{name}.log"
    process = start_detached(command.argv, log_path, command.environment)
    record = ServiceRecord(process=process, url=command.url)
    save_record(_record_path(home, name), record)
    started.append(name)
    return record


def _wait_until(
    name: str, record: ServiceRecord, healthy: Callable[[], bool], deadline_s: float
) -> None:
    def answers() -> bool:
        _check_alive(name, record)
        return healthy()

    wait_for(answers, f"{name} at {record.url}", deadline_s, poll_s=0.2)


def _check_alive(name: str, record: ServiceRecord) -> None:
    if not is_alive(record.process):
        log_path = record.process.log_path
        raise ServiceError(f"{name} ended; {log_path}:{log_tail(log_path)}")


def _stop_servers(home: Path, names: list[str]) -> list[str]:
    started = time.monotonic()
    ended = []
    records = {
        name: record
        for name in names
        if name != "ray" and (record := load_record(_record_path(home, name), ServiceRecord))
    }
    worker = records.pop("worker", None)
    if worker is not None:
        stop_all([worker.process], DOWN_DEADLINE_S / 2)
        _record_path(home, "worker").unlink(missing_ok=True)
        ended.append("worker")
    left_s = DOWN_DEADLINE_S - (time.monotonic() - started)
    stop_all([record.process for record in records.values()], left_s)
    for name in records:
        _record_path(home, name).unlink(missing_ok=True)
        ended.append(name)
    return ended


def _status_of(home: Path, name: str, answers: Callable[[str], bool]) -> ServiceStatus:
    record = load_record(_record_path(home, name), ServiceRecord)
    if record is None or not is_alive(record.process):
        return ServiceStatus(name, "down")
    state = "up" if answers(record.url) else "silent"
    return ServiceStatus(name, state, record.url, record.process.pid)


def _running_url(home: Path, name: str) -> str | None:
    record = load_record(_record_path(home.absolute(), name), ServiceRecord)
    return record.url if record is not None and is_alive(record.process) else None


def _record_path(home: Path, name: str) -> Path:
    return home / "services" / f"{name}.json"


def _lock_path(home: Path) -> Path:
    return home / "services" / "services.lock"
