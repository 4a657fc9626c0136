"""Stamps that identify the process that wrote a file, to detect files of dead writers.

Promises: a stamp identifies one process of one boot of one machine and PID namespace; `is_dead` is
True only if that is certain, so a writer elsewhere never counts as dead.
"""

import functools
import hashlib
import os
import re
from pathlib import Path

_STAMP = re.compile(r"([0-9a-f]{8})\.(\d+)\.(\d+)")


def own_stamp() -> str:
    """Return `<machine>.<pid>.<start>` of this process, which is valid in a file name."""
    pid = os.getpid()
    return f"{_machine()}.{pid}.{_started(pid) or 0}"


def find_stamp(name: str) -> str | None:
    """Return the stamp in a file name; None if there is none."""
    match = _STAMP.search(name)
    return match.group(0) if match else None


def is_dead(stamp: str) -> bool:
    """Return True if the process ran on this machine and has ended; False if it ran elsewhere."""
    match = _STAMP.fullmatch(stamp)
    if match is None or match.group(1) != _machine():
        return False
    return _started(int(match.group(2))) != int(match.group(3))


def living_pid(stamp: str) -> int | None:
    """Return the pid of a process that is alive on this machine; None if it is dead or unknown."""
    match = _STAMP.fullmatch(stamp)
    if match is None or match.group(1) != _machine():
        return None
    pid = int(match.group(2))
    return pid if _started(pid) == int(match.group(3)) else None


@functools.cache
def _machine() -> str:
    """Return an id of this boot and PID namespace, in which a pid identifies one process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "0" * 8  # without /proc the start time of a process is unknown, too
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:  # ticks since boot; None: gone, or a zombie
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process name in parentheses may contain any character; the fields follow it.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])
