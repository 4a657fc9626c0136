"""The log of a stage, `stages/<fingerprint>/<n>`, which fences off attempts that were replaced.

Each entry says *held by X* or *committed D* and is made by one exclusive create, so exactly one
caller makes entry n. Only the holder of entry n may commit n + 1; if n + 1 exists, that holder is
fenced. A new generation starts with a *held* after a *committed* (forced), or with a *held* that
adopts other work. An entry also records how many bytes of each earlier journal segment of its
generation count; what a suspended writer appends later is ignored. Entries never change, and after
a kill at any moment an entry exists completely or not at all. The log does not show which
processes live; a process that adds a *held* entry must have checked that.

Followers are the processes that wait for a stage. Promises: `leave` counts the others that wait, so
that their job is not stopped. A dead follower does not count: on this machine its process is gone;
on another one its record was not renewed for `STALE_S`, by the store's clock. Until that is
noticed, the job merely runs on.
"""

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, FencedError, StoreError
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.store.canonical import canonical_json
from infra.store.files import Files, Found
from infra.store.heartbeat import FixedFile, checked_content
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.stage_spec import Adoption, CommitRecord, check_fingerprint

logger = logging.getLogger(__name__)

NUM_READERS = 8
STALE_S = 120.0
"""A follower on another machine that was silent for this long, by the store's clock, is dead."""


class Holder(FrozenModel):
    """Identifies the process that requested an attempt, and the Ray job that runs it."""

    id: str  # unique
    process: str  # stamp of the process that requested it (`infra.store.process_stamp`)
    ray_job: str = "none"  # perhaps that of the previous stage; `none`: no Ray job
    cluster: str = ""  # of that job: `infra.ray.jobs.RayJobs.cluster_id`


class LogEntry(FrozenModel):
    """One entry of a stage's log."""

    schema_version: int = 1
    kind: Literal["held", "committed"]
    number: int
    """Position in the log; for a *held* entry also the number of the attempt."""
    holder: Holder
    host: str = ""
    force: str = ""
    """Token that requested this generation; empty for the first one."""
    adopted: Adoption | None = None
    """In a *held* that starts a generation: the work that its attempts continue."""
    journal: dict[int, int] = {}
    """Number of bytes that count in each earlier journal segment of the generation, by attempt."""
    record: CommitRecord | None = None
    made_at: str
    """UTC, for people; no decision depends on it."""


@dataclass(frozen=True)
class Attempt:
    """The right of `holder` (an id) to commit entry `number` + 1."""

    fingerprint: str
    number: int
    holder: str


class Segment(NamedTuple):
    """The part of one attempt's journal that counts: its first `num_bytes`."""

    attempt: int
    num_bytes: int | None  # None while the attempt may still append


class StageLogs(ABC):
    """The logs of all stages of a store, and the followers that wait for them.

    Args:
        journal_bytes: returns the bytes of complete lines of the journal segment of an attempt,
            given by fingerprint and number.
    """

    def __init__(self, files: Files, journal_bytes: Callable[[str, int], int]) -> None:
        self._files = files
        self._journal_bytes = journal_bytes
        self._known: dict[tuple[str, int], LogEntry] = {}

    @abstractmethod
    def join(self, fingerprint: str, follower: str) -> None:
        """Record that a follower waits; called repeatedly while it waits.

        Raises:
            OSError: not recorded, so others may believe that no follower waits.
        """

    def leave(self, fingerprint: str, follower: str) -> int:
        """Record that a follower stopped waiting; return how many others wait."""
        own = follower_name(fingerprint, follower)
        found = self._files.listed(f"{own.rpartition('/')[0]}/")
        self._forget(fingerprint, follower)
        now = max((each.changed_at for each in found), default=0.0)
        return sum(self._waits(each, now) for each in found if each.name != own)

    @abstractmethod
    def followed_by(self, follower: str) -> list[str]:
        """Return the fingerprints that a follower joined and did not leave."""

    @abstractmethod
    def _forget(self, fingerprint: str, follower: str) -> None:
        """Remove the record of a follower, which may be absent."""

    @abstractmethod
    def _stamp(self, record: bytes) -> str:
        """Return the process stamp in the record of a follower; empty if it is damaged."""

    def entries(self, fingerprint: str) -> list[LogEntry]:
        """Return the stage's log; raise `ArtifactCorruptError` if an entry is lost or damaged."""
        numbers = self._numbers(f"{_log(fingerprint)}/")
        return self._entries(fingerprint, numbers.get(fingerprint, []))

    def generation(self, fingerprint: str, attempt: int | None = None) -> Sequence[LogEntry]:
        """Return the entries of an attempt's generation, as the function `generation`."""
        return generation(self.entries(fingerprint), attempt)

    def journal_segments(self, fingerprint: str, attempt: int | None = None) -> list[Segment]:
        """Return the journal segments of a generation in order; arguments as for `generation`."""
        members = self.generation(fingerprint, attempt)
        counted = members[-1].journal if members else {}
        return [Segment(e.number, counted.get(e.number)) for e in members if e.kind == "held"]

    def logs(self) -> dict[str, list[LogEntry] | None]:
        """Return all logs as `entries`, by fingerprint, sorted; None for a damaged one.

        Entries that this process has read before are not read again.
        """

        def log(found: tuple[str, Sequence[int]]) -> list[LogEntry] | None:
            try:
                return self._entries(*found)
            except ArtifactCorruptError:
                return None

        numbers = self._numbers("stages/")
        with ThreadPoolExecutor(NUM_READERS, "logs") as pool:
            return dict(sorted(zip(numbers, pool.map(log, numbers.items()), strict=True)))

    def hold(
        self,
        fingerprint: str,
        holder: Holder,
        number: int,
        force: str = "",
        adopted: Adoption | None = None,
    ) -> Attempt:
        """Make the *held* entry `number`; the caller knows that the previous attempt is over.

        Args:
            number: length of the log when the caller read it.
            force: token of a new generation; ignored while the current one has no commit.
            adopted: work that the attempt continues, which starts a generation.

        Raises:
            FencedError: another caller made that entry, or the earlier log was removed.
        """
        log = self.entries(fingerprint)
        if number > len(log):
            raise FencedError(f"{fingerprint[:12]}: log entries before {number} were removed")
        goes_on = log[number - 1] if number and log[number - 1].kind == "held" else None
        entry = LogEntry(
            kind="held",
            number=number,
            holder=holder,
            host=socket.gethostname(),
            force=goes_on.force if goes_on else force,
            adopted=adopted,
            journal=self._counted(fingerprint, goes_on) if goes_on and not adopted else {},
            made_at=_now(),
        )
        fault("stage_log.before_hold")
        if not self._create(fingerprint, entry):
            standing = self._entry(fingerprint, number)
            if standing.holder != holder:
                raise FencedError(_fenced(fingerprint, number, standing))
        return Attempt(fingerprint, number, holder.id)

    def check(self, attempt: Attempt) -> None:
        """Raise `FencedError` unless the attempt's entry is the last one."""
        log = self.entries(attempt.fingerprint)
        if len(log) <= attempt.number or log[attempt.number].holder.id != attempt.holder:
            raise FencedError(
                f"{attempt.fingerprint[:12]}: attempt {attempt.number} does not hold the stage"
            )
        if len(log) > attempt.number + 1:
            raise FencedError(_fenced(attempt.fingerprint, attempt.number + 1, log[-1]))

    def check_if_reachable(self, attempt: Attempt) -> None:
        """Raise as `check` does; a store that does not answer is only logged."""
        try:
            self.check(attempt)
        except StoreError as error:
            logger.warning("cannot check that this attempt still holds its stage: %s", error)

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Make the *committed* entry and return its record; a second call changes nothing.

        Raises:
            FencedError: another attempt took over.
        """
        held = self._entry(attempt.fingerprint, attempt.number)
        if held.holder.id != attempt.holder or held.kind != "held":
            raise FencedError(_fenced(attempt.fingerprint, attempt.number, held))
        entry = LogEntry(
            kind="committed",
            number=attempt.number + 1,
            holder=held.holder,
            host=socket.gethostname(),
            force=held.force,
            journal=self._counted(attempt.fingerprint, held),
            record=record,
            made_at=_now(),
        )
        fault("storage.before_commit")
        if self._create(attempt.fingerprint, entry):
            return record
        standing = self._entry(attempt.fingerprint, entry.number)
        if standing.record is None or standing.holder.id != attempt.holder:
            raise FencedError(_fenced(attempt.fingerprint, entry.number, standing))
        return standing.record

    def _waits(self, each: Found, now: float) -> bool:
        record = self._files.get(each.name)
        if record is None:
            return False
        if now - each.changed_at > STALE_S or is_dead(self._stamp(record)):
            _, fingerprint, _, follower = each.name.split("/")
            self._forget(fingerprint, follower)
            return False
        return True

    def _numbers(self, prefix: str) -> dict[str, list[int]]:
        """Return the sorted numbers of the entries below a directory, by fingerprint."""
        found: dict[str, list[int]] = {}
        for each in self._files.listed(prefix):
            fingerprint, name = each.name.split("/")[-2:]
            if name.isdigit():
                found.setdefault(fingerprint, []).append(int(name))
        return {fingerprint: sorted(numbers) for fingerprint, numbers in found.items()}

    def _entries(self, fingerprint: str, numbers: Sequence[int]) -> list[LogEntry]:
        if list(numbers) != list(range(len(numbers))):
            raise ArtifactCorruptError(
                f"{self._files.place(_log(fingerprint))} has entries {numbers}; restore the others"
            )
        return [self._entry(fingerprint, number) for number in numbers]

    def _counted(self, fingerprint: str, held: LogEntry) -> dict[int, int]:
        """Return by attempt how many journal bytes count, up to the attempt of a *held* entry."""
        return {**held.journal, held.number: self._journal_bytes(fingerprint, held.number)}

    def _create(self, fingerprint: str, entry: LogEntry) -> bool:
        name = f"{_log(fingerprint)}/{entry.number}"
        return self._files.create(name, canonical_json(entry) + b"\n")

    def _entry(self, fingerprint: str, number: int) -> LogEntry:
        known = self._known.get((fingerprint, number))
        if known is not None:
            return known
        name = f"{_log(fingerprint)}/{number}"
        try:
            entry = LogEntry.model_validate_json(self._read(name))
        except ValidationError as error:
            reason = f"is no entry of a stage log: {str(error).splitlines()[0]}"
            raise ArtifactCorruptError(f"{self._files.place(name)} {reason}") from error
        of = entry.record.fingerprint if entry.record is not None else fingerprint
        if entry.number != number or of != fingerprint:
            raise ArtifactCorruptError(f"{self._files.place(name)} is entry {entry.number} of {of}")
        self._known[fingerprint, number] = entry
        return entry

    def _read(self, name: str) -> bytes:
        data = self._files.get(name)
        if data is None:
            raise ArtifactCorruptError(f"{self._files.place(name)} is lost; restore it")
        return data


class LocalStageLogs(StageLogs):
    """`StageLogs` in a directory; a follower is a file `work/<fingerprint>/followers/<name>`."""

    def __init__(self, files: Files, root: Path, journal_bytes: Callable[[str, int], int]) -> None:
        super().__init__(files, journal_bytes)
        self._root = root
        self._joined: dict[Path, FixedFile] = {}

    def join(self, fingerprint: str, follower: str) -> None:
        """See `StageLogs.join`. The file keeps its size: a full disk fails only the first call."""
        path = self._root / follower_name(fingerprint, follower)
        if path not in self._joined or not path.exists():
            self._joined[path] = FixedFile(path)
        self._joined[path].write(own_stamp().encode())

    def followed_by(self, follower: str) -> list[str]:
        """See `StageLogs.followed_by`."""
        found = self._root.glob(f"work/*/followers/{check_fingerprint(follower)}")
        return sorted(path.parent.parent.name for path in found)

    def _numbers(self, prefix: str) -> dict[str, list[int]]:
        """See `StageLogs`. Entries are not opened: one that cannot be read is not absent."""
        logs = self._root.glob("stages/[!.]*") if prefix == "stages/" else [self._root / prefix]
        found: dict[str, list[int]] = {}
        for log in logs:
            with suppress(FileNotFoundError):
                names = [path.name for path in log.iterdir()]
                found[log.name] = sorted(int(name) for name in names if name.isdigit())
        return found

    def _read(self, name: str) -> bytes:
        # An `OSError` is retried: a collector may have hidden the log and put it back.
        return (self._root / name).read_bytes()

    def _forget(self, fingerprint: str, follower: str) -> None:
        path = self._root / follower_name(fingerprint, follower)
        if file := self._joined.pop(path, None):
            file.close()
        path.unlink(missing_ok=True)

    def _stamp(self, record: bytes) -> str:
        return (checked_content(record) or b"").decode()


def latest_commit(entries: Sequence[LogEntry], force: str = "") -> CommitRecord | None:
    """Return the newest commit record, or None; a `force` token selects its generation."""
    return next((e.record for e in reversed(entries) if e.record and force in {"", e.force}), None)


def generation(entries: Sequence[LogEntry], attempt: int | None = None) -> Sequence[LogEntry]:
    """Return the *held* entries of an attempt's generation, and its *committed* one if it exists.

    Its attempts share step checkpoints. None as `attempt` means the newest generation.
    """
    if not entries:
        return ()
    at = len(entries) - 1 if attempt is None else attempt
    begins = {0, *(entry.number for entry in entries if entry.adopted)}
    begins |= {entry.number + 1 for entry in entries if entry.kind == "committed"}
    end = min((number for number in begins if number > at), default=None)
    return entries[max(number for number in begins if number <= at) : end]


def current_generation(entries: Sequence[LogEntry]) -> int:
    """Return the number of the first attempt of the generation in progress, else of the next."""
    members = generation(entries)
    return members[0].number if members and members[-1].kind == "held" else len(entries)


def follower_name(fingerprint: str, follower: str) -> str:
    """Return the name of a follower's record in a store."""
    return f"work/{check_fingerprint(fingerprint)}/followers/{check_fingerprint(follower)}"


def _log(fingerprint: str) -> str:
    return f"stages/{check_fingerprint(fingerprint)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _fenced(fingerprint: str, number: int, standing: LogEntry) -> str:
    return (
        f"entry {number} of {fingerprint[:12]} is taken: {standing.kind} by "
        f"{standing.holder.id} ({standing.holder.process}) at {standing.made_at}"
    )
