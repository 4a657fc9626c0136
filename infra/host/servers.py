"""Servers of a home: recorded before they run, shared by their users, ended with the last one.

`<home>/services/<name>.json` names each by a mark that its whole family carries in its
environment, and is written before the process exists: whenever a starter is killed, the server is
found and ended by that mark. All of Ray, Prefect and MLflow go through here.
Promises: two processes that need one server share it; it ends with its last living user, a
service (`persistent`) with `end` only; a server that could not be recorded does not stay; what is
on a full disk ends like anything else.
Does not promise: to notice users that were killed. `infra.host.guard` does, inside the server.
"""

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from infra import env
from infra.errors import ServiceError
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.host.loopback_http import answers_ok
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
LOCK_DEADLINE_S = 3 * (START_DEADLINE_S + STOP_DEADLINE_S)
"""Whoever holds a server's lock may start it, end it and start it again, twice."""

_log = logging.getLogger(__name__)


class Server(FrozenModel):
    """What a server is called and where it answers."""

    name: str
    """`prefect`, `worker`, `mlflow`, `ray` or `prefect-embedded`."""
    url: str
    """Where its clients reach it; a worker answers through its server."""
    health_url: str = ""
    """Answers 200 when the server can work; empty for a worker."""
    gcs_address: str = ""
    """Of a Ray head, `host:port` for `ray.init`."""
    token_path: Path | None = None
    """Of a Ray head, the file with the token that its clients show."""


class ServerCommand(Server):
    """One server, not yet started."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment of its process."""


class ServerRecord(Server):
    """`<home>/services/<name>.json`: a server that is about to start, or runs."""

    mark: str
    """Value of RLHF_PROCESS_MARK in the environment of the whole family."""
    log_path: Path
    users: tuple[ProcessIdentity, ...]
    """Processes that asked for it and have not left it."""
    persistent: bool
    """A service: it outlives its users."""
    process: ProcessRecord | None = None
    """None until the starter has seen it run."""

    @property
    def living_users(self) -> tuple[ProcessIdentity, ...]:
        """Those users that still run."""
        return tuple(user for user in self.users if is_alive(user))

    @property
    def is_running(self) -> bool:
        """Whether its first process still runs."""
        return self.process is not None and is_alive(self.process)


def record_path(home: Path, name: str) -> Path:
    """Where a server's record is."""
    return home / "services" / f"{name}.json"


def load(home: Path, name: str) -> ServerRecord | None:
    """A server's record, if there is one."""
    return load_record(record_path(home, name), ServerRecord)


def running(home: Path, name: str) -> ServerRecord | None:
    """A server's record, if it runs."""
    record = load(home.absolute(), name)
    return record if record is not None and record.is_running else None


def recorded(home: Path) -> list[str]:
    """Names of all servers of a home that have a record."""
    return sorted(path.stem for path in (home / "services").glob("*.json"))


def lock(home: Path, name: str) -> contextlib.AbstractContextManager[None]:
    """What guards a server's record and its start and end.

    Args:
        home: of the server.
        name: of the server.

    Returns:
        To be entered; waits for another holder as `file_lock` does, up to `LOCK_DEADLINE_S`.
    """
    return file_lock(home / "services" / f"{name}.lock", LOCK_DEADLINE_S)


def start(home: Path, command: ServerCommand, *, persistent: bool) -> ServerRecord:
    """Start a server, recorded from before its first instruction on; called under its lock.

    Args:
        home: where its record and its log go.
        command: what to start.
        persistent: whether it outlives its users; otherwise this process is its first.

    Returns:
        Its record. It may not answer yet.

    Raises:
        ServiceError: it ended at once.
        OSError: it could not be recorded; it does not run.
    """
    record = ServerRecord(
        name=command.name,
        mark=uuid.uuid4().hex,
        log_path=home / "logs" / f"{command.name}.log",
        url=command.url,
        health_url=command.health_url,
        gcs_address=command.gcs_address,
        token_path=command.token_path,
        users=() if persistent else (own_identity(),),
        persistent=persistent,
    )
    path = record_path(home, command.name)
    save_record(path, record)
    fault("server.before_start")
    try:
        environment = {**command.environment, env.RLHF_PROCESS_MARK.name: record.mark}
        environment.pop(env.RLHF_FAULTS.name, None)
        process = start_detached(command.argv, record.log_path, environment, mark=record.mark)
        fault("server.before_record")
        record = record.model_copy(update={"process": process})
        save_record(path, record)
    except BaseException:
        stop(home, record)
        raise
    fault("server.recorded")
    return record


def join(home: Path, record: ServerRecord, *, persistent: bool) -> ServerRecord:
    """Become a user of a server, or make it a service; called under its lock."""
    me = own_identity()
    wanted = record.persistent or persistent
    if record.persistent == wanted and (persistent or me in record.users):
        return record
    users = record.living_users if persistent else (*record.living_users, me)
    record = record.model_copy(update={"users": users, "persistent": wanted})
    save_record(record_path(home, record.name), record)
    return record


def leave(home: Path, name: str, is_busy: Callable[[], bool] = lambda: False) -> bool:
    """Say that this process needs a server no more; its last user ends it.

    Args:
        home: of the server.
        name: of the server.
        is_busy: whether it has work that goes on without users; asked of the last user.

    Returns:
        Whether the server was ended.
    """
    with lock(home, name):
        record = load(home, name)
        if record is None:
            return False
        me = own_identity()
        others = tuple(user for user in record.living_users if user != me)
        if not others and not record.persistent and not is_busy():
            stop(home, record)
            return True
        # On a full disk our name stays; that we are dead soon says the same.
        with contextlib.suppress(OSError):
            save_record(record_path(home, name), record.model_copy(update={"users": others}))
        return False


def end(home: Path, name: str, *, spare_users: bool = False) -> bool:
    """End a server, whether or not its start was seen to its end.

    Args:
        home: of the server.
        name: of the server.
        spare_users: leave a server that is no service and that a living process uses.

    Returns:
        Whether there was one, and it was ended.
    """

    def is_spared(record: ServerRecord) -> bool:
        return spare_users and not record.persistent and bool(record.living_users)

    record = load(home, name)
    if record is None or is_spared(record):
        return False  # without the lock, which its user may hold for as long as it starts
    with lock(home, name):
        record = load(home, name)
        if record is None or is_spared(record):
            return False
        stop(home, record)
        return True


def stop(home: Path, *records: ServerRecord) -> None:
    """End servers with everything they started, then forget them; called under their locks.

    Args:
        home: of the servers.
        *records: of the servers; `STOP_DEADLINE_S` holds for all of them together.
    """
    processes = [record.process for record in records if record.process is not None]
    with uninterrupted():  # without its guard, a dead server's record would be there for ever
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
    """Wait until a server can work.

    Args:
        record: of the server.
        is_ready: whether it can; by default whether its health address answers.
        deadline_s: in seconds.
        given_up: whether nobody wants it any more.

    Raises:
        ServiceError: it ended, or nobody wants it; carries the path and the tail of its log.
        DeadlineError: it runs and cannot work.
    """

    def answers() -> bool:
        if given_up():
            raise ServiceError(f"the start of {record.name} was given up")
        if not record.is_running:
            raise ServiceError(
                f"{record.name} ended; {record.log_path}:{log_tail(record.log_path)}"
            )
        return is_ready() if is_ready else answers_ok(record.health_url)

    what = f"{record.name} at {record.url}; its log is {record.log_path}"
    wait_for(answers, what, deadline_s, poll_s=0.1)
