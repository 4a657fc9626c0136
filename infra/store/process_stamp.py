"""Stamps that identify the process that wrote a file, to detect files of dead writers.

Promises: a stamp identifies one process of one boot of one machine and PID namespace; `is_dead` is
True only if that is certain, so a writer elsewhere never counts as dead.
"""

import functools
import hashlib
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

_STAMP = re.compile(r"([0-9a-f]{8})\.(\d+)\.(\d+)")


def own_stamp() -> str:
    """Return `<machine>.<pid>.<start>` of this process, which is valid in a file name."""
    pid = os.getpid()
    return f"{_machine()}.{pid}.{started_ticks(pid) or 0}"


def find_stamp(name: str) -> str | None:
    """Return the stamp in a file name; None if there is none."""
    match = _STAMP.search(name)
    return match[0] if match else None


def is_dead(stamp: str) -> bool:
    """Return True if the process ran on this machine and has ended; False if it ran elsewhere."""
    match = _STAMP.fullmatch(stamp)
    return match is not None and match[1] == _machine() and living_pid(stamp) is None


def living_pid(stamp: str) -> int | None:
    """Return the pid of a process that is alive on this machine; None if it is dead or unknown."""
    match = _STAMP.fullmatch(stamp)
    if match is None or match[1] != _machine():
        return None
    return int(match[2]) if started_ticks(int(match[2])) == int(match[3]) else None


@functools.cache
def _machine() -> str:
    """Return an id of the machine, boot and PID namespace, in which a pid names one process."""
    # Start times of macOS are unique over its boots; the address of its network tells it apart.
    machine = boot_id() or str(uuid.getnode())
    with suppress(OSError):  # no /proc, or a sandbox that hides it
        machine += f" {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(machine.encode()).hexdigest()[:8]


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def started_ticks(pid: int) -> int | None:
    """Return when a process started; None if it is gone or a zombie.

    In ticks since boot, which clock jumps do not change; without a boot id (macOS) in hundredths of
    a second since the epoch.
    """
    with suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        if not boot_id():
            process = psutil.Process(pid)
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            return None if is_zombie else round(process.create_time() * 100)
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The process name in parentheses may contain any character; the fields follow it.
        fields = stat[stat.rindex(b")") + 2 :].split()
        return None if fields[0] in {b"Z", b"X"} else int(fields[19])
    return None
