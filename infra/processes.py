"""Child processes that outlive us, known by more than their pid, and ended to the last one.

Promises: a started process leads its own session, inherits no ignored SIGINT and no file mode
that others can read; a record names one process and never another that got its pid later;
`stop` ends the whole family (session, process group, descendants, and whoever inherited the
family's mark and moved to a session of its own) and touches nobody else; every wait here has a
deadline and says what it waits for.
Does not promise: to find a process that left the session AND overwrote its environment AND
lost its parent.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from infra import env
from infra.atomic import atomic_write_bytes
from infra.errors import DeadlineError, ServiceError

Value = TypeVar("Value")
Record = TypeVar("Record", bound=BaseModel)

# SIGINT that our parent ignores would be ignored by the child for good: a Prefect worker that
# was started from a shell with `&` then never stops. `preexec_fn` is unsafe beside threads, so
# a first interpreter of a few milliseconds repairs it and becomes the program.
_BOOTSTRAP = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    "os.umask(0o077)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Our own children, kept so that `is_alive` can reap them: a zombie looks alive to others."""


class ProcessIdentity(BaseModel):
    """One process, and never another one that got the same pid later."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    started: str
    """When it started, in ticks of this boot; equal only for the same process."""


class ProcessRecord(ProcessIdentity):
    """A process that we started with `start_detached`; also its session and group id."""

    mark: str
    """Value of RLHF_PROCESS_MARK in the environment of the whole family."""
    argv: tuple[str, ...]
    log_path: Path


def identify(pid: int) -> ProcessIdentity | None:
    """The living process with this pid; None if there is none or it is a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return ProcessIdentity(pid=pid, started=_start_stamp(process))
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def own_identity() -> ProcessIdentity:
    """This process."""
    return ProcessIdentity(pid=os.getpid(), started=_start_stamp(psutil.Process()))


def is_alive(process: ProcessIdentity) -> bool:
    """Whether that very process still runs."""
    child = _children.get(process.pid)
    if child is not None and child.poll() is not None:
        del _children[process.pid]
    found = identify(process.pid)
    return found is not None and found.started == process.started


def start_detached(
    argv: Sequence[str],
    log_path: Path,
    environment: Mapping[str, str],
    cwd: Path | None = None,
) -> ProcessRecord:
    """Start a program as the leader of a new session; it survives us.

    Args:
        argv: program and arguments.
        log_path: gets its output, appended; its directory is created.
        environment: the whole environment of the program.
        cwd: its working directory; ours by default.
    """
    mark = uuid.uuid4().hex
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment, env.RLHF_PROCESS_MARK.name: mark},
            cwd=cwd,
        )
    _children[child.pid] = child
    found = identify(child.pid)
    if found is None:
        raise ServiceError(f"{argv[0]} ended at once; its log is {log_path}{log_tail(log_path)}")
    return ProcessRecord(
        pid=child.pid, started=found.started, mark=mark, argv=tuple(argv), log_path=log_path
    )


def stop(record: ProcessRecord, deadline_s: float = 10.0) -> None:
    """End a process and its family; see `stop_all`."""
    stop_all([record], deadline_s)


def stop_all(records: Sequence[ProcessRecord], deadline_s: float) -> None:
    """End processes and their families: SIGTERM, and SIGKILL after half of the deadline.

    Args:
        records: may be dead already; what is left of their families still ends.
        deadline_s: for all of them together, in seconds.

    Raises:
        DeadlineError: some process survived.
    """
    started = time.monotonic()
    known: set[psutil.Process] = set()
    signalled: set[psutil.Process] = set()
    while True:
        # Again each time: a family may fork while it is being ended, and descendants can no
        # longer be told once their parent is gone.
        known |= _families(records)
        living = {process for process in known if _is_running(process)}
        if not living:
            return
        waited_s = time.monotonic() - started
        if waited_s >= deadline_s:
            pids = sorted(process.pid for process in living)
            raise DeadlineError(f"processes {pids} to end", deadline_s)
        if waited_s >= deadline_s / 2:
            _signal(living, signal.SIGKILL)
        else:
            _signal(living - signalled, signal.SIGTERM)
            signalled |= living
        time.sleep(0.05)


def wait_for(
    predicate: Callable[[], Value | None],
    what: str,
    deadline_s: float,
    poll_s: float = 0.1,
) -> Value:
    """Poll until the predicate gives something true.

    Args:
        predicate: is called at least once; its exceptions end the wait.
        what: what is waited for, in words, for the error.
        deadline_s: seconds until the wait is given up.
        poll_s: seconds between two calls.

    Returns:
        What the predicate gave.

    Raises:
        DeadlineError: it never gave anything true.
    """
    ends_at = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= ends_at:
            raise DeadlineError(what, deadline_s)
        time.sleep(poll_s)


@contextlib.contextmanager
def file_lock(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold an exclusive lock on a file of this host; the kernel frees it if we die.

    Raises:
        DeadlineError: another process held it all the time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquired() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait_for(acquired, f"the lock {path}, held by another process", deadline_s)
        yield
    finally:
        os.close(descriptor)


def pick_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that are free now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def pick_port(preferred: int) -> int:
    """`preferred` if it is free on the loopback interface now, else another one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return pick_ports(1)[0]
    return preferred


def log_tail(path: Path, num_lines: int = 15) -> str:
    """The last lines of a log, each on a new indented line; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "".join(f"\n    {line}" for line in lines[-num_lines:])


def save_record(path: Path, record: BaseModel) -> None:
    """Keep a record, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, record.model_dump_json(indent=2).encode())


def load_record(path: Path, model: type[Record]) -> Record | None:
    """Read a record; None if there is none.

    Raises:
        ServiceError: the file is no such record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ServiceError(f"{path} is not a {model.__name__} ({reason}); remove it") from error


def _start_stamp(process: psutil.Process) -> str:
    """Start time in ticks since boot, with the boot's id: a clock that jumps changes neither.

    Outside Linux, the creation time that psutil knows.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return f"{process.create_time():.2f}"
    # The program's name, in parentheses, may itself hold spaces and parentheses.
    stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    return f"{boot_id}:{stat.rpartition(')')[2].split()[19]}"


def _families(records: Sequence[ProcessRecord]) -> set[psutil.Process]:
    """Every living process that belongs to one of the records."""
    # A session keeps its number while it has members. Only if another process has the leader's
    # pid now was the number given away; its members are then strangers.
    sessions = set()
    for record in records:
        holder = identify(record.pid)
        if (holder is None or holder.started == record.started) and _same_boot(record):
            sessions.add(record.pid)
    marks = {record.mark for record in records}
    members = {p for p in psutil.process_iter() if _belongs(p, sessions, marks)}
    for process in tuple(members):
        with contextlib.suppress(psutil.NoSuchProcess):
            members.update(process.children(recursive=True))
    return {process for process in members if process.pid != os.getpid()}


def _belongs(process: psutil.Process, sessions: set[int], marks: set[str]) -> bool:
    try:
        if os.getsid(process.pid) in sessions or os.getpgid(process.pid) in sessions:
            return True
        return process.environ().get(env.RLHF_PROCESS_MARK.name) in marks
    except (psutil.Error, ProcessLookupError, PermissionError, OSError):
        return False  # it is gone, or another user's and so not ours


def _same_boot(record: ProcessRecord) -> bool:
    return record.started.partition(":")[0] == own_identity().started.partition(":")[0]


def _is_running(process: psutil.Process) -> bool:
    child = _children.get(process.pid)
    if child is not None:
        child.poll()
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: set[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        # psutil compares the start time first, so a reused pid is not hit.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
