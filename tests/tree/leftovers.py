"""What a test leaves behind is an error of that test: nothing of ours lives on into the next one.

Looked for, once the fixtures of a test have ended: threads that our code started, processes,
listening sockets of Python, variables of the environment. Each belongs to the test, module or
session whose turn it was when it began: what a fixture of a module begins ends with the module,
and so does what is begun by its threads, its pools and its processes, and a process that works in
its directories.
Promises: a message of one line for each thing, what it is, since when and from where; no test
waits unless something is left. Variables that `infra.env` sets for the life of a process may stay.
Does not promise: to see what a library starts for itself, nor a process that has neither our
environment nor us as its parent.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import thread as pool_threads
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from infra.errors import DeadlineError
from infra.waiting import wait_for

MARK = "PYTEST_LEFTOVERS_OWNER"
"""The variable of the environment by which a process tells whose turn began it."""
_SCOPES = {"session": 0, "package": 0, "module": 1, "class": 1}
"""Place of each scope's owner; a test's comes last."""
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_PASSED_OVER = (__file__, os.path.join("_pytest", "monkeypatch.py"))
_SET_FOR_PROCESS = os.path.join("infra", "env.py")
_KEPT_PROCESSES = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)
"""Processes that a library starts once and keeps; torch compiles for a device in some."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_YOUNG_S = 2.0
"""A process of this age has long replaced the environment that it was forked with."""


@dataclass(eq=False)
class Owner:
    """A test, a module or the session, and what was begun in its turn."""

    name: str
    number: int = field(default_factory=itertools.count(1).__next__)
    began_s: float = field(default_factory=lambda: _uptime_s())
    threads: list[weakref.ref[threading.Thread]] = field(default_factory=list)
    sockets: list[weakref.ref[socket.socket]] = field(default_factory=list)
    directories: list[bytes] = field(default_factory=list)
    """Temporary ones that were made in its turn."""
    variables: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    """What each variable of the environment was, and where our code changed it, if it did."""


@dataclass(frozen=True)
class Begun:
    """Whose a thread, pool or socket is, and since when and from where."""

    owner: Owner
    origin: str
    told: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))

    def __str__(self) -> str:
        return f"since {self.told}, from {self.origin}"


_owners: list[Owner] = []
"""The session, its module and its test; none outside of a test's turn."""
_turn: list[Owner] = []
"""The one whose turn it is: that of a fixture is its scope's."""
_origins: dict[int, str] = {}
"""Where each child of this process was started."""
_process = uuid.uuid4().hex
_records: weakref.WeakKeyDictionary[Any, Begun | None] = weakref.WeakKeyDictionary()
"""Of threads, pools and sockets; None is a library's."""


@functools.cache
def _library_directories() -> tuple[str, ...]:
    """Directories that distributions were installed into, but for a checkout's own."""
    found = {f"{distribution.locate_file('')}{os.sep}" for distribution in metadata.distributions()}
    return tuple(directory for directory in found if not __file__.startswith(directory))


@functools.cache
def _whose(file: str) -> str:
    """`ours`, `theirs` (a library's), or nothing for what says nothing about who calls."""
    if file.startswith(_library_directories()):
        return "" if file.endswith(_PASSED_OVER) else "theirs"
    if file.startswith((_STANDARD_LIBRARY, "<")) or file.endswith(_PASSED_OVER):
        return ""
    return "ours"


def _origin() -> tuple[str, str]:
    """Whose code is the nearest on the stack, and where; nothing if all is the standard library."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if whose := _whose(file):
            return whose, f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "", ""


def _begun(*, within: bool = False) -> Begun | None:
    """What begins now, if it is ours; `within` counts what a library begins in a thread of ours."""
    parent = _records.get(threading.current_thread())
    whose, origin = _origin()
    if whose == "ours" and _turn:
        return Begun(parent.owner if parent else _turn[0], origin)
    return parent if within or not whose else None


def _note_thread(thread: threading.Thread) -> None:
    if getattr(thread, "_target", None) is pool_threads._worker:
        begun = _records.get(thread._args[0]())  # a pool's threads begin when it has work
    else:
        begun = _begun()
    _records[thread] = begun
    if begun:
        begun.owner.threads.append(weakref.ref(thread))


def _note_pool(pool: concurrent.futures.Executor) -> None:
    _records[pool] = _begun()


def _note_socket(listening: socket.socket) -> None:
    _records[listening] = begun = _begun(within=True)
    if begun:
        begun.owner.sockets.append(weakref.ref(listening))


def _note_child(child: subprocess.Popen[bytes], _: object) -> None:
    _origins[child.pid] = _origin()[1]


def _note_directory(_: pytest.TempPathFactory, made: Path) -> None:
    if _turn:
        _turn[0].directories.append(bytes(made))


def _note_variable(environ: "os._Environ[str]", name: str) -> None:
    if environ is not os.environ or not _turn or name == MARK:
        return
    whose, origin = _origin()
    is_ours = whose == "ours" and not origin.rpartition(":")[0].endswith(_SET_FOR_PROCESS)
    before, where = _turn[0].variables.get(name, (environ.get(name), ""))
    _turn[0].variables[name] = (before, origin if is_ours else where)


def _record(kind: type, method: str, note: Callable[..., None], *, after: bool = False) -> None:
    """Note each call of a method, before or after it."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def noted(self: object, *args: object, **kwargs: object) -> object:
        if not after:
            note(self, *args[:1]) if kind is os._Environ else note(self)
        returned = original(self, *args, **kwargs)
        if after:
            note(self, returned)
        return returned

    setattr(kind, method, noted)


@functools.cache
def record_what_begins() -> None:
    """From here on, for the life of this process; a second call does nothing."""
    _record(threading.Thread, "start", _note_thread)
    _record(pool_threads.ThreadPoolExecutor, "__init__", _note_pool)
    _record(socket.socket, "listen", _note_socket)
    _record(subprocess.Popen, "__init__", _note_child, after=True)
    _record(pytest.TempPathFactory, "mktemp", _note_directory, after=True)
    _record(os._Environ, "__setitem__", _note_variable)
    _record(os._Environ, "__delitem__", _note_variable)


@dataclass(frozen=True)
class Process:
    """A process of this machine, as it was when it was seen."""

    pid: int
    parent: int
    command: str
    began_s: float
    owner: int
    """Number of its owner; 0 is none of ours."""

    @classmethod
    def look(cls, pid: int) -> "Process":
        """Whose it is: by the mark in its environment, or, as a child of ours, by its start.

        Raises:
            OSError: it is gone.
        """
        stat = _stat(pid)
        parent, began_s = int(stat[1]), int(stat[19]) * _TICK_S
        if parent == os.getpid():
            _see_it_begun(pid)
        arguments, environment = _bytes(pid, "cmdline"), _bytes(pid, "environ")
        command = arguments.replace(b"\0", b" ").decode(errors="replace")[:200].strip()
        marked = re.search(rf"{MARK}={_process}:(\d+)".encode(), environment)
        owner = 0
        if any(name in command for name in _KEPT_PROCESSES):
            pass
        elif marked:
            owner = int(marked[1])
        elif parent == os.getpid():
            owner = max((o.number for o in _owners if o.began_s < began_s + _TICK_S), default=0)
        if owner == _owners[-1].number:  # a server that the first test to need it starts
            homes = [o for o in _owners for d in o.directories if d in arguments + environment]
            owner = homes[0].number if homes else owner
        return cls(pid, parent, command, began_s, owner)

    def lives(self) -> bool:
        """Whether it still runs."""
        try:
            return _stat(self.pid)[0] not in "ZX"
        except OSError:
            return False

    def __str__(self) -> str:
        told = time.strftime("%H:%M:%S", time.localtime(time.time() - _uptime_s() + self.began_s))
        origin = _origins.get(self.pid) or f"process {self.parent}"
        return f"process {self.pid} `{self.command}`, since {told}, from {origin}"


def _uptime_s() -> float:
    """The clock by which processes begin."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _see_it_begun(pid: int) -> None:
    """Wait until a child of ours has its command line: amid its `exec` it has none for a moment."""
    with contextlib.suppress(DeadlineError):
        wait_for(
            lambda: _bytes(pid, "cmdline") or _stat(pid)[0] == "Z",
            f"command line of process {pid}",
            _YOUNG_S,
            poll_s=0.001,
        )


def _bytes(pid: int, name: str) -> bytes:
    """A file of a process; nothing if it is another user's, the kernel's or gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on; OSError if it is gone."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


class Leftovers:
    """The plugin.

    Args:
        deadline_s: what is about to end may take so long, on a machine that is busy.
    """

    def __init__(self, deadline_s: float = 20.0) -> None:
        self._deadline_s = deadline_s
        self._seen: dict[int, Process] = {}
        record_what_begins()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Begin the turn of a test, and of what it is the first of."""
        if not _owners:
            _owners.append(Owner("the session"))
        if len(_owners) == 1:
            _owners.append(Owner(item.nodeid.partition("::")[0]))
        _owners.append(Owner(item.nodeid))
        _take_turn(_owners[-1])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object]
    ) -> Generator[None, object, object]:
        """What a fixture begins is its scope's."""
        place = _SCOPES.get(fixturedef.scope)
        if place is None or not _turn:
            return (yield)
        before = _turn[0]
        _take_turn(_owners[place])
        try:
            return (yield)
        finally:
            _take_turn(before)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None]:
        """Look for what is left, behind the fixtures."""
        try:
            yield
        except BaseException as error:
            for line in self._end(item, nextitem):
                error.add_note(line)
            raise
        if left := self._end(item, nextitem):
            pytest.fail("\n".join(left), pytrace=False)

    def _end(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[str]:
        """End the turn of a test, and of what it is the last of; what is left of each, in lines."""
        kept = 0
        if nextitem is not None:
            same = item.getparent(pytest.Module) is nextitem.getparent(pytest.Module)
            kept = 2 if same else 1
        left = []
        while len(_owners) > kept:
            left += self._wait(_owners[-1])
            _owners.pop()
        _turn.clear()
        return left

    def _wait(self, owner: Owner) -> list[str]:
        """What is still left of an owner at the deadline."""
        deadline = time.monotonic() + self._deadline_s
        while (alive := self._alive(owner)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [f"{owner.name} leaves {what}" for what in alive + _changed(owner)]

    def _alive(self, owner: Owner) -> list[str]:
        """Threads, sockets and processes, each as a line."""
        alive = []
        for thread in filter(None, (reference() for reference in owner.threads)):
            if thread.is_alive():
                target = getattr(thread, "_target", None) or type(thread)
                name = getattr(target, "__qualname__", repr(target))
                alive.append(f"thread {thread.name} of {name}, {_records[thread]}")
        for listening in filter(None, (reference() for reference in owner.sockets)):
            if listening.fileno() >= 0:
                alive.append(f"socket {listening.getsockname()}, {_records[listening]}")
        for process in self._processes():
            if process.owner == owner.number and process.lives():
                alive.append(str(process))
        return alive

    def _processes(self) -> list[Process]:
        """Those of the machine; a stranger that is young is read again."""
        if sys.platform != "linux":
            return []
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        now_s = _uptime_s()
        seen = {pid: process for pid, process in self._seen.items() if pid in pids}
        found = dict(seen)
        for pid in pids - seen.keys():
            try:
                found[pid] = Process.look(pid)
            except OSError:
                continue
            if found[pid].owner or now_s - found[pid].began_s > _YOUNG_S:
                seen[pid] = found[pid]
        self._seen = seen
        return list(found.values())


def _take_turn(owner: Owner) -> None:
    _turn[:] = [owner]
    os.environ[MARK] = f"{_process}:{owner.number}"


def _changed(owner: Owner) -> list[str]:
    """Variables that our code changed, and that are not what they were."""
    wider = [before for other in _owners if other is not owner for before in [other.variables]]
    changed = []
    for name, (before, where) in owner.variables.items():
        now = os.environ.get(name)
        restored = any(name in known and known[name][0] == now for known in wider)
        if where and now != before and not restored:
            what = "set" if before is None else "removed" if now is None else "changed"
            changed.append(f"variable {name}, {what} from {where}")
    return changed
