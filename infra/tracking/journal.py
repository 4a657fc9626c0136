"""A stage's append-only journal of metrics, progress and log lines: one strict JSON line each.

Each attempt of a stage appends to its own segment; `read_journal` returns the valid records of a
generation's segments, as the stage's log defines them, to any number of readers. `StageHistory`
reads specifications and commits, too.
Promises: a record survives any kill and power loss once its method returns (fsync); opening cuts an
incomplete tail; a metric of a step is recorded once, so steps that are repeated after a resume add
no duplicates; times never decrease; a full disk delays a record and does not end the job.
Does not promise: that two writers can share a segment.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, field_serializer

from infra.errors import ConfigError, JournalError
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.store.atomic import fsync_directory
from infra.store.canonical import canonical_json
from infra.store.files import read_stretch
from infra.store.stage_spec import Adoption, CommitRecord, StageSpec
from infra.store.storage import Storage
from infra.waiting import when_there_is_room

NOTHING_READ: Mapping[int, int] = {}
RecordKind = Literal["metrics", "progress", "log"]


class JournalRecord(FrozenModel):
    """One line of a journal."""

    kind: RecordKind
    time_ms: int
    """Milliseconds since the epoch, UTC; never less than in the previous record."""
    step: int | None = None
    """`metrics`: step of the values."""
    values: Mapping[str, float] = {}
    """`metrics`: values by name; NaN and infinities are JSON strings in the file."""
    done: int | None = None
    """`progress`: units done, of `total`."""
    total: int | None = None
    message: str = ""
    """`progress` and `log`: one line for people."""

    @field_serializer("values")
    def _strict_json(self, values: Mapping[str, float]) -> dict[str, float | str]:
        """Write NaN and infinities, which JSON lacks, as strings that pydantic parses."""
        return {k: v if math.isfinite(v) else json.dumps(v) for k, v in values.items()}

    def to_line(self) -> bytes:
        """Serialize the record as one line, line end included."""
        values = self.model_dump(exclude_none=True)
        return canonical_json({k: v for k, v in values.items() if v not in ({}, "")}) + b"\n"


class Journal(AbstractContextManager["Journal"]):
    """The only writer of a journal file; it creates the file or cuts an incomplete tail.

    Args:
        earlier: valid records of earlier segments; their steps are not recorded again.
        adopted: work that the generation continues; its steps count as done.

    Raises:
        JournalError: the file is damaged before its last record.
    """

    def __init__(
        self,
        path: Path,
        earlier: Iterable[JournalRecord] = (),
        adopted: Adoption | None = None,
    ) -> None:
        self.num_done = num_done((), adopted)
        """Number of finished steps of the stage, over all its segments."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recorded: dict[int, set[str]] = {}
        self._time_ms = 0
        with ExitStack() as undo:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = undo.enter_context(open(os.open(path, flags, 0o644), "ab", buffering=0))
            records, self._end = read_records(path)
            self._file.truncate(self._end)
            os.fsync(self._file.fileno())
            fsync_directory(path.parent)
            undo.pop_all()
        for record in (*earlier, *records):
            self._remember(record)

    def metrics(self, step: int, values: Mapping[str, float]) -> bool:
        """Record metrics of a step; False if the step already has all of these names.

        Existing names are kept: a repeated step is bitwise equal to the first one except for
        timings.
        """
        have = self._recorded.get(step, set())
        fresh = {name: float(value) for name, value in values.items() if name not in have}
        if fresh:
            at_ms = self._now()
            self._append(JournalRecord(kind="metrics", time_ms=at_ms, step=step, values=fresh))
        return bool(fresh)

    def copy(self, records: Iterable[JournalRecord]) -> None:
        """Copy metrics of another journal, except for steps that already have some."""
        fresh = [r for r in records if r.step is not None and r.step not in self._recorded]
        if fresh:
            self._append(*fresh)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Record the progress of the stage."""
        self._append(
            JournalRecord(
                kind="progress", time_ms=self._now(), done=done, total=total, message=message
            )
        )

    def log(self, message: str) -> None:
        """Record a line for people."""
        self._append(JournalRecord(kind="log", time_ms=self._now(), message=message))

    def close(self) -> None:
        """Close the file; a second call has no effect."""
        self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, *records: JournalRecord) -> None:
        """Write records durably; waits while the disk is full."""
        line = b"".join(record.to_line() for record in records)
        when_there_is_room(lambda: self._write(line), str(self._path))
        self._end += len(line)
        for record in records:
            self._remember(record)

    def _write(self, line: bytes) -> None:
        """Write lines durably, or restore the file and raise."""
        fault("journal.before_write")
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
            fault("journal.after_write")
            os.fsync(self._file.fileno())
        except OSError:
            # Readers report an incomplete line in the middle of the file as damage.
            self._file.truncate(self._end)
            raise

    def _remember(self, record: JournalRecord) -> None:
        self._time_ms = max(self._time_ms, record.time_ms)
        self.num_done = max(self.num_done, record.done or 0)
        if record.step is not None:
            self._recorded.setdefault(record.step, set()).update(record.values)

    def _now(self) -> int:
        return max(self._time_ms, time.time_ns() // 1_000_000)


def num_done(records: Iterable[JournalRecord], adopted: Adoption | None) -> int:
    """Return the number of finished steps according to the valid records and the adopted work."""
    return max([adopted.step if adopted else 0, *(each.done or 0 for each in records)])


def read_records(path: Path, offset: int = 0) -> tuple[list[JournalRecord], int]:
    """Return the complete records from a byte offset on, and the offset after them; none if absent.

    Raises:
        JournalError: a line before the last is damaged.
    """
    return _records(read_stretch(path, offset), offset, str(path))


def read_journal(
    storage: Storage,
    fingerprint: str,
    positions: Mapping[int, int] = NOTHING_READ,
    attempt: int | None = None,
) -> tuple[list[JournalRecord], dict[int, int]]:
    """Return the valid records of a generation after some positions, and the new positions.

    Args:
        positions: bytes read before, by attempt, as an earlier call returned them.
        attempt: any attempt of the generation; None means the newest generation.

    Raises:
        JournalError: a record that is not the last of its segment is damaged.
    """
    channel = storage.channel(fingerprint)
    records: list[JournalRecord] = []
    new = dict(positions)
    while True:
        segments = storage.attempts.journal_segments(fingerprint, attempt)
        for number, end in segments:
            start = new.get(number, 0)
            found, new[number] = _records(
                channel.read_journal(number, start, end), start, f"attempt {number}"
            )
            records += found
        # If another attempt took over meanwhile, it determines the valid records: an old attempt
        # may have written more.
        if storage.attempts.journal_segments(fingerprint, attempt) == segments:
            return records, new
        records, new = [], dict(positions)


class StageHistory:
    """Reads journals, specifications and commits of the stages of one store."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def records(
        self, fingerprint: str, position: str, generation: int | None = None
    ) -> tuple[list[JournalRecord], str]:
        """Return the journal records of a stage after a position, and the new position.

        An empty position is the start. `generation` is its first attempt's number; None: the
        newest.

        Raises:
            JournalError: the journal is damaged, or the position does not belong to it.
        """
        try:
            read = {int(number): end for number, end in json.loads(position or "{}").items()}
        except (ValueError, AttributeError):
            raise JournalError(f"{position!r} is no position of a journal") from None
        records, new = read_journal(self.storage, fingerprint, read, generation)
        return records, json.dumps(new, sort_keys=True)

    def specification(self, fingerprint: str) -> StageSpec | None:
        """Return the newest readable specification of a stage; None if there is none."""
        for entry in reversed(self.storage.attempts.entries(fingerprint)):
            if entry.kind == "held":
                with suppress(ConfigError):
                    return self.storage.channel(fingerprint).read_specification(entry.number)
        return None

    def commit(self, fingerprint: str, generation: int) -> CommitRecord | None:
        """Return the commit of a generation (number of its first attempt); None without one."""
        members = self.storage.attempts.generation(fingerprint, generation)
        return members[-1].record if members else None


def _records(data: bytes, offset: int, where: str) -> tuple[list[JournalRecord], int]:
    records = []
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines):
        try:
            records.append(_parse(line))
        except ValueError as error:
            # After a power loss the last line may have its end but lack its middle.
            if number == len(lines) - 1:
                break
            reason = str(error).splitlines()[0]
            raise JournalError(f"{where}: damaged record at byte {offset}: {reason}") from error
        offset += len(line) + 1
    return records, offset


def _parse(line: bytes) -> JournalRecord:
    try:
        return JournalRecord.model_validate(json.loads(line, parse_constant=_refuse_constant))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
