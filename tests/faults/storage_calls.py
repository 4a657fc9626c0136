"""The storage system calls of a forked child, each of which its parent may fail or make the last.

The kernel asks the parent before each call of the table (seccomp user notification, Linux 5.5), of
every thread and whatever language made it; nothing is installed and no privilege is needed.
Promises: a child that is killed at a call, or is told that it failed, did not make it.
Does not promise: to see writes through a shared mapping of a file; `msync` is seen.
"""

import array
import ctypes
import fcntl
import itertools
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ARM = platform.machine() == "aarch64"
_FD, _PATH, _AT, _PATHS, _ATS = "fd", "path", "at", "paths", "ats"
"""Where a call has its files: arguments 0; 0; 0 and 1; 0 and 1; 0 and 1, 2 and 3."""

_CALLS: dict[str, tuple[int | None, int | None, str]] = {
    # name: number on x86-64, number on aarch64, where its files are
    "open": (2, None, _PATH), "creat": (85, None, _PATH), "openat": (257, 56, _AT),
    "openat2": (437, 437, _AT), "write": (1, 64, _FD), "pwrite64": (18, 68, _FD),
    "writev": (20, 66, _FD), "pwritev": (296, 70, _FD), "pwritev2": (328, 287, _FD),
    "sendfile": (40, 71, _FD), "copy_file_range": (326, 285, _FD), "truncate": (76, 45, _PATH),
    "ftruncate": (77, 46, _FD), "fallocate": (285, 47, _FD), "fsync": (74, 82, _FD),
    "fdatasync": (75, 83, _FD), "sync_file_range": (277, 84, _FD), "syncfs": (306, 267, _FD),
    "rename": (82, None, _PATHS), "renameat": (264, 38, _ATS), "renameat2": (316, 276, _ATS),
    "link": (86, None, _PATHS), "linkat": (265, 37, _ATS), "symlink": (88, None, _PATHS),
    "unlink": (87, None, _PATH), "unlinkat": (263, 35, _AT), "rmdir": (84, None, _PATH),
    "mkdir": (83, None, _PATH), "mkdirat": (258, 34, _AT), "chmod": (90, None, _PATH),
    "fchmod": (91, 52, _FD), "fchmodat": (268, 53, _AT), "utimensat": (280, 88, _AT),
}  # fmt: skip
_READS: dict[str, tuple[int | None, int | None, str]] = {
    "read": (0, 63, _FD), "pread64": (17, 67, _FD), "readv": (19, 65, _FD),
    "getdents64": (217, 61, _FD), "stat": (4, None, _PATH), "lstat": (6, None, _PATH),
    "fstat": (5, 80, _FD), "newfstatat": (262, 79, _AT), "statx": (332, 291, _AT),
    "access": (21, None, _PATH), "faccessat": (269, 48, _AT), "statfs": (137, 43, _PATH),
    "open": (2, None, _PATH), "openat": (257, 56, _AT), "openat2": (437, 437, _AT),
}  # fmt: skip
_TABLE = _READS | _CALLS

_SECCOMP = 277 if _ARM else 317
_NO_NEW_PRIVILEGES, _FILTER_MODE, _NEW_LISTENER = 38, 1, 8
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_AT_FDCWD = -100
_DEADLINE_S = 60.0
KILL = -1
"""A verdict: the child makes neither this call nor any other."""


@dataclass(frozen=True)
class Call:
    """One call, not yet made.

    Attributes:
        name: of the system call.
        paths: of its files; the last one is what gets a name.
        changes: whether it may change what is stored, as opening for reading does not.
    """

    name: str
    paths: tuple[str, ...]
    changes: bool


@dataclass(frozen=True)
class Point:
    """What became of work whose n-th call failed, or was the last.

    Attributes:
        call: that call.
        before: the calls that were made.
        code: how the child ended, as of `watched`.
    """

    call: Call
    before: tuple[Call, ...] = field(repr=False)
    code: int


class UnsupportedError(Exception):
    """The kernel, or what the tests run in, does not let a process watch another."""


def every_call(
    work: Callable[[], object],
    roots: Sequence[Path],
    verdict: int,
    prepare: Callable[[], object],
    *,
    changes: bool = True,
) -> Iterator[Point]:
    """Do something again and again, each time with the next of its storage calls failing.

    Args:
        work: done in a fork.
        roots: of the files that count.
        verdict: `KILL` or an errno.
        prepare: called before each time.
        changes: of the calls that change something; False: of those that read.

    Yields:
        One point per call, until the work is done before its n-th.
    """
    calls = frozenset(_CALLS if changes else _READS)
    below = tuple(f"{root}/" for root in roots)
    for number in itertools.count(1):
        prepare()
        made: list[Call] = []

        def decide(call: Call, made: list[Call] = made, number: int = number) -> int:
            if call.changes != changes or not any(f"{p}/".startswith(below) for p in call.paths):
                return 0
            made.append(call)
            return verdict if len(made) == number else 0

        code = watched(work, calls, decide)
        if len(made) < number:
            assert code == 0, f"what nothing disturbed ended with {code}"
            return
        yield Point(made[number - 1], tuple(made[: number - 1]), code)


def traced(work: Callable[[], object], roots: Sequence[Path]) -> list[Call]:
    """The calls that work makes and that change something below `roots`, in order."""
    below = tuple(f"{root}/" for root in roots)
    made: list[Call] = []

    def decide(call: Call) -> int:
        if call.changes and any(f"{path}/".startswith(below) for path in call.paths):
            made.append(call)
        return 0

    code = watched(work, frozenset(_CALLS), decide)
    assert code == 0, f"what nothing disturbed ended with {code}"
    return made


def watched(
    work: Callable[[], object], calls: frozenset[str], decide: Callable[[Call], int]
) -> int:
    """Do something in a fork.

    Args:
        work: what the child does; an exception ends it with exit code 1.
        calls: names to be asked about.
        decide: the verdict on a call: 0, an errno, or `KILL`.

    Returns:
        Exit code of the child; -9 if it was killed.

    Raises:
        UnsupportedError: this machine cannot do that.
    """
    if platform.machine() not in {"x86_64", "aarch64"}:
        raise UnsupportedError(f"needs x86-64 or aarch64; this is {platform.machine()}")
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        os._exit(_be_watched(work, calls, theirs))
    theirs.close()
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    ours.close()
    if not ancillary:
        raise UnsupportedError("needs Linux 5.5, and a host that allows seccomp filters")
    listener = array.array("i", ancillary[0][2])[0]
    try:
        _serve(child, listener, decide)
    finally:
        os.close(listener)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _be_watched(work: Callable[[], object], calls: frozenset[str], theirs: socket.socket) -> int:
    try:
        listener = _ask_about(calls)
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", listener))])
        os.close(listener)
        work()
    except BaseException:  # noqa: BLE001  process boundary
        if sys.flags.dev_mode:
            traceback.print_exc()
        return 1
    return 0


def _ask_about(calls: frozenset[str]) -> int:
    """Install the filter in this process and all threads that it starts; returns the listener."""
    numbers = [number for name in calls if (number := _TABLE[name][_ARM]) is not None]
    # Load the number; jump to the last line but one where it is one of ours.
    lines = [(0x20, 0, 0, 0)]
    lines += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0:
        listener = libc.syscall(_SECCOMP, _FILTER_MODE, _NEW_LISTENER, program)
        if listener >= 0:
            return listener
    raise OSError(ctypes.get_errno(), "seccomp")


def _serve(child: int, listener: int, decide: Callable[[Call], int]) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    names = {row[_ARM]: name for name, row in _TABLE.items()}
    while True:
        ready = poll.poll(1000 * _DEADLINE_S)
        assert ready, f"the child made no storage call and did not end within {_DEADLINE_S:g} s"
        if not ready[0][1] & select.POLLIN:
            return  # no process has the filter any more
        notice = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except FileNotFoundError:
            continue
        identity, thread, _, number, _, _, *arguments = struct.unpack("QIIiIQ6Q", notice)
        verdict = decide(_described(names[number], thread, arguments))
        if verdict == KILL:
            os.kill(child, signal.SIGKILL)
            return
        answer = struct.pack("QqiI", identity, 0, -verdict, 0 if verdict else _CONTINUE)
        fcntl.ioctl(listener, _SEND, answer)


def _described(name: str, process: int, arguments: list[int]) -> Call:
    where = _TABLE[name][2]
    changes = name in _CALLS
    match where:
        case "fd":
            paths = [_of_descriptor(process, arguments[0])]
        case "path":
            paths = [_at(process, _AT_FDCWD, arguments[0])]
        case "at":
            paths = [_at(process, arguments[0], arguments[1])]
        case "paths":
            paths = [_at(process, _AT_FDCWD, argument) for argument in arguments[:2]]
        case _:
            paths = [_at(process, *arguments[i : i + 2]) for i in (0, 2)]
    if name in {"open", "openat"}:
        changes = bool(
            arguments[2 if where == "at" else 1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
    return Call(name, tuple(paths), changes)


def _of_descriptor(process: int, descriptor: int) -> str:
    signed = ctypes.c_int(descriptor & 0xFFFFFFFF).value
    link = "cwd" if signed == _AT_FDCWD else f"fd/{signed}"
    try:
        return os.readlink(f"/proc/{process}/{link}")
    except FileNotFoundError:
        return ""


def _at(process: int, descriptor: int, address: int) -> str:
    """The path of a directory and a string in the memory of a process."""
    if address == 0:
        return _of_descriptor(process, descriptor)
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        # Not over the end of the page, behind which there may be none.
        data = memory.read(4096 - address % 4096)
        if b"\0" not in data:
            data += memory.read(4096)
    name = os.fsdecode(data.split(b"\0")[0])
    return os.path.join(_of_descriptor(process, descriptor), name) if name[:1] != "/" else name
