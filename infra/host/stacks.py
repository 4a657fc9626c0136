"""Stacks of hanging processes: on a signal, each appends its own to its log.

Promises: the stacks of all threads, even of a process that is stuck in native code with the GIL;
for a process that does not answer, its kernel state. Processes of other machines cannot be asked.
"""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

from infra.store.files import read_stretch
from infra.store.process_stamp import living_pid, own_stamp

STACKS_SIGNAL = signal.SIGUSR2
ANSWER_S = 2.0
POLL_S = 0.1
_SUFFIX = ".process"


def leave_stacks_on_signal(log: IO[str], path: Path) -> None:
    """Let this process answer the signal; its stamp is written beside its log, which stays open."""
    faulthandler.register(STACKS_SIGNAL, log, all_threads=True)
    # After the handler: the signal would kill a process without one.
    path.with_suffix(_SUFFIX).write_text(own_stamp(), encoding="ascii")


def ask_for_stacks(directory: Path) -> str:
    """Ask every process with a log below a directory; return the stacks by name of the log."""
    asked: dict[Path, tuple[int | None, int]] = {}
    for mark in sorted(directory.rglob(f"*{_SUFFIX}")):
        log, pid = mark.with_suffix(".log"), living_pid(mark.read_text(encoding="ascii"))
        asked[log] = (pid, log.stat().st_size if log.exists() else 0)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline and not all(
        pid is None or _added(log, size) for log, (pid, size) in asked.items()
    ):
        time.sleep(POLL_S)
    time.sleep(POLL_S if asked else 0.0)  # let answers that have begun end
    return "".join(
        f"{log.stem}:\n{(pid and _added(log, size)) or _state(pid)}\n"
        for log, (pid, size) in asked.items()
    )


def _added(log: Path, size: int) -> str:
    return read_stretch(log, size).decode(errors="replace")


def _state(pid: int | None) -> str:
    if pid is None:
        return "it has ended, or runs on another machine"
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return "it has ended"
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    return f"it does not answer; {' '.join(state.split())}"
