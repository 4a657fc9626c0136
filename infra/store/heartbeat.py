"""A sign of life in a file, for a watcher that shares no more than the disk with the process.

Promises: while the interpreter can run a thread, the file is rewritten every `every_s`, whole;
a stopped process, a dead one and one stuck in native code that holds the interpreter all let it
age. The age is taken from the monotonic clock of this boot of this machine, so a clock that
jumps makes nobody look dead; on another machine, or after a reboot, from the wall clock.
Does not promise: that the main thread advances. `progress_age_s` says how long phase and step
have not changed.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.store.atomic import temporary_sibling

_log = logging.getLogger(__name__)


class _Beat(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True)

    pid: int
    step: int | None
    phase: str
    time: float
    """Wall clock, seconds since the epoch."""
    monotonic_s: float
    boot_id: str
    progress_age_s: float


@dataclass(frozen=True)
class HeartbeatState:
    """What a heartbeat file says.

    Attributes:
        pid: process id of the writer, on its host.
        step: the last step the job told, None before the first.
        phase: what the job is doing.
        age_s: seconds since the file was written.
        progress_age_s: seconds since `phase` or `step` last changed, `age_s` included.
    """

    pid: int
    step: int | None
    phase: str
    age_s: float
    progress_age_s: float


class Heartbeat:
    """Writes the file from a thread while the context is open; the job sets `phase` and `step`.

    Args:
        path: the file; its directory must exist.
        every_s: seconds between two beats, > 0.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        if every_s <= 0:
            raise ValueError(f"every_s: got {every_s}; need > 0")
        self.phase = "start"
        self.step: int | None = None
        self._path = path
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._seen: tuple[str, int | None] = (self.phase, self.step)
        self._changed_at = time.monotonic()

    def __enter__(self) -> Self:
        # Here an unwritable directory raises in the job, not in the thread.
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=10 * self._every_s)
        self._beat_or_warn()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._beat_or_warn()

    def _beat_or_warn(self) -> None:
        """A full disk must not end the job here: it will say so where it saves."""
        try:
            self._beat()
        except OSError as error:
            _log.warning("heartbeat %s not written: %s", self._path, error)

    def _beat(self) -> None:
        now = time.monotonic()
        state = (self.phase, self.step)
        if state != self._seen:
            self._seen, self._changed_at = state, now
        beat = _Beat(
            pid=os.getpid(),
            phase=state[0],
            step=state[1],
            time=time.time(),
            monotonic_s=now,
            boot_id=_boot_id(),
            progress_age_s=now - self._changed_at,
        )
        # Whole, but without fsync: after a power loss there is no life to tell of.
        temporary = temporary_sibling(self._path)
        try:
            temporary.write_text(beat.model_dump_json(), encoding="utf-8")
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)


def read_heartbeat(path: Path) -> HeartbeatState | None:
    """What a heartbeat file says now.

    Args:
        path: the file.

    Returns:
        The state; None if the file is absent, or a power loss spoiled it.

    Raises:
        OSError: it could not be read, which says nothing about the writer.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        beat = _Beat.model_validate_json(data)
    except ValidationError:
        # A living writer leaves only whole files, so whoever wrote this is gone.
        _log.warning("%s holds no heartbeat", path)
        return None
    if beat.boot_id and beat.boot_id == _boot_id():
        age_s = time.monotonic() - beat.monotonic_s
    else:
        age_s = time.time() - beat.time
    age_s = max(0.0, age_s)
    return HeartbeatState(beat.pid, beat.step, beat.phase, age_s, age_s + beat.progress_age_s)


def heartbeat_age_s(path: Path) -> float | None:
    """Seconds since the last beat; None if there never was one."""
    state = read_heartbeat(path)
    return None if state is None else state.age_s


def _boot_id() -> str:
    """Names this boot of this machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
