"""Servers of a home: recorded before they run, shared by users, ended with the last user.

All of Ray, Prefect and MLflow are started here. `<home>/services/<name>.json` is written before the
process exists and has a mark that the whole process family carries in its environment. So at
whatever moment the starter is killed, the server can be found and ended by its mark.
Promises: processes that need one server share it. It ends with its last living user; a persistent
one ends with `end` only. A server that cannot be recorded is ended. Ending works on a full disk.
Does not promise: to notice killed users. `infra.host.guard` does, inside the server.
"""

import contextlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from infra import env
from infra.errors import ServiceError, on_failure
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.host.ports import answers_ok
from infra.host.processes import (
    ProcessIdentity,
    ProcessRecord,
    is_alive,
    own_identity,
    start_detached,
    stop_all,
)
from infra.host.records import file_lock, load_record, log_tail, save_record
from infra.host.signals import uninterrupted
from infra.waiting import wait_for

START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 12.0
LOCK_DEADLINE_S = 3 * (START_DEADLINE_S + STOP_DEADLINE_S)  # its holder may start and end it twice


class Server(FrozenModel):
    """Name and address of a server."""

    name: str  # `prefect`, `worker`, `mlflow`, `ray` or `prefect-embedded`
    url: str  # address for its clients; a worker is reached through its server
    health_url: str = ""  # answers 200 when the server is ready; empty for a worker
    gcs_address: str = ""  # Ray head only: `host:port` for `ray.init`
    token_path: Path | None = None  # Ray head only: file with the token for its clients


class ServerCommand(Server):
    """A server to start; `environment` replaces that of the starting process."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


class ServerRecord(Server):
    """`<home>/services/<name>.json`: a server that is about to start, or runs."""

    mark: str  # value of RLHF_PROCESS_MARK in the environment of the whole family
    log_path: Path
    users: tuple[ProcessIdentity, ...]
    persistent: bool
    process: ProcessRecord | None = None  # None until the starter has seen it run

    @property
    def living_users(self) -> tuple[ProcessIdentity, ...]:
        """Users that still run."""
        return tuple(user for user in self.users if is_alive(user))

    @property
    def is_needed(self) -> bool:
        """True if it is persistent or has a living user."""
        return self.persistent or bool(self.living_users)

    @property
    def is_running(self) -> bool:
        """True if its first process still runs."""
        return self.process is not None and is_alive(self.process)


def record_path(home: Path, name: str) -> Path:
    """Return the path of a server's record."""
    return home / "services" / f"{name}.json"


def load(home: Path, name: str) -> ServerRecord | None:
    """Return a server's record; None if no record exists."""
    return load_record(record_path(home, name), ServerRecord)


def running(home: Path, name: str) -> ServerRecord | None:
    """Return a server's record if it runs, else None."""
    record = load(home.absolute(), name)
    return record if record and record.is_running else None


def recorded(home: Path) -> list[str]:
    """Return the names of all servers of a home that have a record."""
    return sorted(path.stem for path in (home / "services").glob("*.json"))


def lock(home: Path, name: str) -> contextlib.AbstractContextManager[None]:
    """Return the lock to start, end or record a server; it waits up to `LOCK_DEADLINE_S`."""
    return file_lock(home / "services" / f"{name}.lock", LOCK_DEADLINE_S)


def start(home: Path, command: ServerCommand, *, persistent: bool) -> ServerRecord:
    """Start a server that is recorded before its process exists; the caller holds its lock.

    It may not answer yet. Unless it is persistent, this process is its first user.

    Raises:
        ServiceError: the server ended at once.
        OSError: the server could not be recorded; it does not run.
    """
    record = ServerRecord(
        **command.model_dump(include=set(Server.model_fields)),
        mark=uuid.uuid4().hex,
        log_path=home / "logs" / f"{command.name}.log",
        users=() if persistent else (own_identity(),),
        persistent=persistent,
    )
    path = record_path(home, command.name)
    save_record(path, record)
    fault("server.before_start")
    with on_failure(lambda _: stop(home, record)):
        environment = {**command.environment}
        environment.pop(env.RLHF_FAULTS.name, None)
        process = start_detached(command.argv, record.log_path, environment, mark=record.mark)
        fault("server.before_record")
        record = record.model_copy(update={"process": process})
        save_record(path, record)
    fault("server.recorded")
    return record


def join(home: Path, record: ServerRecord, *, persistent: bool) -> ServerRecord:
    """Become a user of a server, or make it persistent; the caller holds its lock."""
    me = own_identity()
    wanted = record.persistent or persistent
    if record.persistent == wanted and (persistent or me in record.users):
        return record
    users = record.living_users if persistent else (*record.living_users, me)
    record = record.model_copy(update={"users": users, "persistent": wanted})
    save_record(record_path(home, record.name), record)
    return record


def leave(home: Path, name: str, is_busy: Callable[[], bool] = lambda: False) -> bool:
    """Stop using a server; the last user ends it unless persistent or busy. True if it ended."""
    with lock(home, name):
        record = load(home, name)
        if record is None:
            return False
        others = tuple(user for user in record.living_users if user != own_identity())
        if not others and not record.persistent and not is_busy():
            stop(home, record)
            return True
        # On a full disk this user stays recorded, which is harmless once this process has ended.
        with contextlib.suppress(OSError):
            save_record(record_path(home, name), record.model_copy(update={"users": others}))
        return False


def end(home: Path, name: str, *, spare_users: bool = False) -> bool:
    """End a server, even if its start was interrupted; return True if one was ended.

    With `spare_users`, a server that is not persistent and has a living user keeps running.
    """

    def found() -> ServerRecord | None:
        record = load(home, name)
        is_spared = spare_users and record and not record.persistent and record.living_users
        return None if is_spared else record

    if found() is None:  # without the lock, which a user holds while the server starts
        return False
    with lock(home, name):
        record = found()
        if record:
            stop(home, record)
        return record is not None


def stop(home: Path, *records: ServerRecord) -> None:
    """End servers with all their processes and remove the records; the caller holds the locks."""
    processes = [record.process for record in records if record.process is not None]
    with uninterrupted():  # else a dead server's record could stay, without a guard to remove it
        stop_all(processes, STOP_DEADLINE_S, marks=[record.mark for record in records])
        for record in records:
            record_path(home, record.name).unlink(missing_ok=True)


def wait_until_ready(
    record: ServerRecord,
    is_ready: Callable[[], bool] | None = None,
    *,
    deadline_s: float = START_DEADLINE_S,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until `is_ready` (None: the health address answers); `given_up` cancels the wait.

    Raises:
        ServiceError: the server ended (with the tail of its log), or its start was given up.
        DeadlineError: the server runs but is not ready.
    """

    def answers() -> bool:
        if given_up():
            raise ServiceError(f"the start of {record.name} was given up")
        if not record.is_running:
            raise ServiceError(
                f"{record.name} ended; {record.log_path}:{log_tail(record.log_path)}"
            )
        return is_ready() if is_ready else answers_ok(record.health_url)

    wait_for(answers, f"{record.name} at {record.url}; its log is {record.log_path}", deadline_s)
