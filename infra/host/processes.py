"""Child processes that outlive their parent, identified by more than a pid, and ended completely.

Promises: a started process leads its own session, and inherits neither an ignored SIGINT nor a
umask that lets others read its files. A record never matches another process that reuses its pid.
`stop_all` ends the whole family (session, process group, descendants, and processes with the
family's mark in other sessions) and no other process. Every wait has a deadline.
Does not promise: to find an orphan that left the session and overwrote its environment.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from infra import env
from infra.errors import DeadlineError, ServiceError
from infra.frozen_model import FrozenModel
from infra.host.records import log_tail
from infra.store import process_stamp

# An ignored SIGINT is inherited: a Prefect worker started from a shell with `&` would never stop.
# `preexec_fn` is unsafe with threads, so a short-lived interpreter resets it and execs the program.
_BOOTSTRAP = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    "os.umask(0o077)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Children of this process, so that `is_alive` can reap them: a zombie looks alive to others."""


class ProcessIdentity(FrozenModel):
    """One process, distinct from a later one with the same pid."""

    pid: int
    started: str
    """Boot id and start time, as of `process_stamp.started_ticks`."""


class ProcessRecord(ProcessIdentity):
    """A process started with `start_detached`; its pid is also its session and group id."""

    mark: str  # value of RLHF_PROCESS_MARK in the environment of the whole family
    argv: tuple[str, ...]
    log_path: Path


def identify(pid: int) -> ProcessIdentity | None:
    """Return the living process with this pid; None if there is none or it is a zombie."""
    ticks = process_stamp.started_ticks(pid)
    started = f"{process_stamp.boot_id()}:{ticks}"
    return None if ticks is None else ProcessIdentity(pid=pid, started=started)


def num_bytes_read() -> int:
    """Return the bytes that this process read from files, cached or not; 0 if unknown."""
    try:
        counted = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(counted.split()[1])  # `rchar: <bytes>` comes first


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    started = f"{process_stamp.boot_id()}:{process_stamp.started_ticks(pid)}"
    return ProcessIdentity(pid=pid, started=started)


def is_alive(process: ProcessIdentity) -> bool:
    """Return True if exactly this process still runs."""
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
    mark: str | None = None,
) -> ProcessRecord:
    """Start a program as the leader of a new session, which outlives this process.

    Its output is appended to the log; `environment` is complete; None as `mark` makes a new one.

    Raises:
        ServiceError: it ended at once.
    """
    mark = mark or uuid.uuid4().hex
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


def stop_all(
    records: Sequence[ProcessRecord], deadline_s: float, marks: Collection[str] = ()
) -> None:
    """End processes and their families: SIGTERM, then SIGKILL after half of the deadline.

    Dead `records` may have living families; `marks` name families whose first process is unknown.

    Raises:
        DeadlineError: a process survived.
    """
    started = time.monotonic()
    known: set[psutil.Process] = set()
    signalled: set[psutil.Process] = set()
    while True:
        # Collected each time: a family may fork meanwhile, and orphans lose their parent link.
        known |= _families(records, marks)
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


def _families(
    records: Sequence[ProcessRecord], known_marks: Collection[str]
) -> set[psutil.Process]:
    # A session keeps its id while it has members, so if another process has the leader's pid now,
    # the session is not the recorded one; nor after another boot, of which macOS tells no id.
    boot, sessions = process_stamp.boot_id(), set[int]()
    for record in records:
        holder = identify(record.pid)
        is_this_boot = bool(boot) and record.started.startswith(f"{boot}:")
        if holder.started == record.started if holder else is_this_boot:
            sessions.add(record.pid)
    marks = {*known_marks, *(record.mark for record in records)}
    members = {p for p in psutil.process_iter() if _belongs(p, sessions, marks)}
    for process in tuple(members):
        with contextlib.suppress(psutil.NoSuchProcess):
            members.update(process.children(recursive=True))
    return {process for process in members if process.pid != os.getpid()}


def _belongs(process: psutil.Process, sessions: set[int], marks: set[str]) -> bool:
    try:
        return (
            not sessions.isdisjoint({os.getsid(process.pid), os.getpgid(process.pid)})
            or process.environ().get(env.RLHF_PROCESS_MARK.name) in marks
        )
    except (psutil.Error, ProcessLookupError, PermissionError, OSError):
        return False  # it is gone, or belongs to another user


def _is_running(process: psutil.Process) -> bool:
    child = _children.get(process.pid)
    if child is not None and child.poll() is None:
        return True  # also a zombie, while other threads of it are still on their way out
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: set[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        # psutil compares the start time first, so a reused pid is not signalled.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
