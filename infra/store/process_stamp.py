"""Which process wrote something, so that whoever finds it can tell whether its writer is dead.

Promises: a stamp names one process of one boot of one machine and process namespace;
`is_dead` is True only when that is certain, so a writer elsewhere never looks dead.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

_STAMP = re.compile(r"([0-9a-f]{8})\.(\d+)\.(\d+)")


def own_stamp() -> str:
    """`<machine>.<pid>.<start>` of this process; plain enough for a file name."""
    pid = os.getpid()
    return f"{_machine()}.{pid}.{_started(pid) or 0}"


def find_stamp(name: str) -> str | None:
    """The stamp inside a file's name; None if there is none."""
    match = _STAMP.search(name)
    return match.group(0) if match else None


def is_dead(stamp: str) -> bool:
    """Whether the process is certainly gone: it was of this machine, and is no more.

    Args:
        stamp: of `own_stamp`, there.

    Returns:
        False also for a process elsewhere, of which nothing is known here.
    """
    match = _STAMP.fullmatch(stamp)
    if match is None or match.group(1) != _machine():
        return False
    return _started(int(match.group(2))) != int(match.group(3))


def living_pid(stamp: str) -> int | None:
    """Id of the process of a stamp, if it lives here; None says only that it is not known to."""
    match = _STAMP.fullmatch(stamp)
    if match is None or match.group(1) != _machine():
        return None
    pid = int(match.group(2))
    return pid if _started(pid) == int(match.group(3)) else None


@functools.cache
def _machine() -> str:
    """This boot of this machine and this process namespace: where a pid means one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "0" * 8  # no /proc: then no process is known by its start either
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """When a process started, in ticks of this boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; state and start time are behind it.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])
