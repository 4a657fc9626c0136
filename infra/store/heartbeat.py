"""A heartbeat file, and the watcher that measures its silence with its own clock.

Promises: while the interpreter can run a thread, the file is overwritten every `every_s`, in place
and with constant size, so a full disk cannot stop it. A stopped or dead process and one stuck in
native code with the GIL become silent. Silence is the time without a new beat while the watcher
could look; clock differences and read errors never make a process look dead. A phase without
progress past its deadline is reported once; the stacks of all threads are written despite the GIL.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from pydantic import BaseModel, ValidationError

from infra.store.process_stamp import own_stamp
from infra.waiting import Repeated

BEAT_BYTES = 512
MAX_GAP_S = 5.0
"""Longest time between two looks that counts as silence; in the rest the watcher was suspended."""

_log = logging.getLogger(__name__)


class Beat(BaseModel, frozen=True):
    """One heartbeat; `number` counts the beats of the process."""

    process: str  # stamp of the writer (`infra.store.process_stamp`)
    number: int
    phase: str
    step: int | None


@dataclass(frozen=True)
class Stall:
    """A phase that made no progress within `deadline_s`; `step` is None before the first step."""

    phase: str
    step: int | None
    deadline_s: float


class FixedFile:
    """A small file that is overwritten in place; its disk space is allocated when it is created."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.ExitStack() as undo:
            self._file = undo.enter_context(open(descriptor, "r+b", buffering=0))
            os.posix_fallocate(descriptor, 0, BEAT_BYTES)
            self.write(b"")
            undo.pop_all()

    def write(self, content: bytes) -> None:
        """Overwrite the file with a checksum, the text and blanks; `ValueError` if too long."""
        checked = b"%08x " % zlib.crc32(content) + content
        if len(checked) >= BEAT_BYTES:
            raise ValueError(f"{len(checked)} bytes; need less than {BEAT_BYTES}")
        os.pwrite(self._file.fileno(), checked.ljust(BEAT_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def checked_content(data: bytes) -> bytes | None:
    """Return the text in the bytes of a `FixedFile`; None if they are torn or damaged."""
    content = data[9:].rstrip()
    return content if data[:8] == b"%08x" % zlib.crc32(content) else None


def read_beat(path: Path) -> Beat | None:
    """Read and parse a heartbeat file; None if absent, torn, damaged or without a beat yet."""
    try:
        return parse_beat(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def parse_beat(data: bytes | None, where: str) -> Beat | None:
    """Parse the bytes of a heartbeat file; None if they are absent, torn, damaged or no beat."""
    content = None if data is None else checked_content(data)
    if not content:
        return None
    try:
        return Beat.model_validate_json(content)
    except ValidationError:
        _log.warning("%s holds no heartbeat", where)
        return None


class BeatWatch:
    """Measures the silence of one process by this process's monotonic clock."""

    def __init__(
        self, read: Callable[[], Beat | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._looked_at: float | None = None
        self.beat: Beat | None = None
        self.silence_s = 0.0
        """Seconds without a new beat in which the watcher could look."""

    def look(self) -> float:
        """Read the beat and return `silence_s`; time after a failed read does not count."""
        looked_at, self._looked_at = self._looked_at, None
        beat = self._read()
        self._looked_at = self._clock()
        if beat is not None and beat != self.beat:
            self.beat, self.silence_s = beat, 0.0
        elif looked_at is not None:
            self.silence_s += min(self._looked_at - looked_at, MAX_GAP_S)
        return self.silence_s

    def skip(self) -> None:
        """Do not count the time until the next look, because the watcher cannot look now."""
        self._looked_at = None


class Heartbeat:
    """Writes heartbeats from a thread while the context is open; the job sets `phase` and `step`.

    `on_stall` is called on that thread for a phase without progress within its deadline, after the
    stacks were written to `stacks` (None: stderr). `deadlines_s` overrides deadlines by phase.
    """

    def __init__(
        self,
        path: Path,
        every_s: float,
        on_stall: Callable[[Stall], None] | None = None,
        stacks: IO[str] | None = None,
        deadlines_s: Mapping[str, float] | None = None,
    ) -> None:
        if every_s <= 0:
            raise ValueError(f"every_s: got {every_s}; need > 0")
        self.phase = "start"
        self.step: int | None = None
        self._deadline_s: float | None = None
        self._path, self._every_s = path, every_s
        self._on_stall, self._stacks = on_stall, stacks or sys.stderr
        self._deadlines_s = deadlines_s or {}
        self._number = self._num_ticks = 0
        self._seen: tuple[object, ...] = ()
        self._changed_at = time.monotonic()

    def enter(self, phase: str, deadline_s: float) -> None:
        """Begin a phase; `deadline_s` is its longest healthy time without a new step or tick."""
        self.phase = phase
        self._deadline_s = self._deadlines_s.get(phase, deadline_s)
        self.tick()

    def tick(self) -> None:
        """Report progress within a step: the deadline of the phase starts again."""
        self._num_ticks += 1

    def __enter__(self) -> Self:
        # The first beat is written here, so an unwritable directory raises in the job.
        self._file = FixedFile(self._path)
        self._beat()
        self._beats = Repeated(self._look, self._every_s, "heartbeat")
        return self

    def __exit__(self, *exception: object) -> None:
        self._beats.end(10 * self._every_s)
        self._beat_or_warn()
        if self._on_stall is not None:
            faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def _look(self) -> None:
        self._beat_or_warn()
        self._watch_progress()

    def _beat_or_warn(self) -> None:
        """Write a beat, or only warn: a failing disk ends the job where it saves, not here."""
        try:
            self._beat()
        except (OSError, ValueError) as error:  # ValueError: the file was closed meanwhile
            _log.warning("heartbeat %s not written: %s", self._path, error)

    def _beat(self) -> None:
        self._number += 1
        beat = Beat(process=own_stamp(), number=self._number, phase=self.phase, step=self.step)
        self._file.write(beat.model_dump_json().encode())

    def _watch_progress(self) -> None:
        """Report a stalled phase once; the stacks come from a timer that does not need the GIL."""
        if self._on_stall is None:
            return
        now, deadline_s = time.monotonic(), self._deadline_s
        state = (self.phase, self.step, self._num_ticks)
        if state != self._seen:
            self._seen, self._changed_at = state, now
            if deadline_s is not None:
                with contextlib.suppress(ValueError):  # stderr is no file, as in some tests
                    faulthandler.dump_traceback_later(deadline_s, file=self._stacks)
        elif deadline_s is not None and now - self._changed_at > deadline_s + self._every_s:
            on_stall, self._on_stall = self._on_stall, None
            on_stall(Stall(self.phase, self.step, deadline_s))
