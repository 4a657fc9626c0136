"""The log of a stage, `stages/<fingerprint>/<n>`, which fences off attempts that were replaced.

Each entry says *held by X* or *committed D* and is made by one exclusive create, so exactly one
caller makes entry n. Only the holder of entry n may commit n + 1; if n + 1 exists, that holder is
fenced. A new generation starts with a *held* after a *committed* (forced), or with a *held* that
adopts other work. An entry also records how many bytes of each earlier journal segment of its
generation count; what a suspended writer appends later is ignored. Entries never change, and after
a kill at any moment an entry exists completely or not at all. The log does not know who is alive;
the maker of the next *held* has to.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from pydantic import ValidationError

from infra.errors import ArtifactCorruptError, FencedError
from infra.faults import fault
from infra.frozen_model import FrozenModel
from infra.store.atomic import create_exclusively, make_directories
from infra.store.canonical import canonical_json
from infra.store.heartbeat import Followers
from infra.store.stage_spec import Adoption, CommitRecord, check_fingerprint

NUM_READERS = 8


class Holder(FrozenModel):
    """The requester of an attempt."""

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
    """By attempt, the bytes that count of the generation's journal segments before this entry."""
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
    """The part that counts of one attempt's journal."""

    attempt: int
    num_bytes: int | None  # None while the attempt may still append


class Attempts(Protocol):
    """The logs of all stages, and their followers."""

    def entries(self, fingerprint: str) -> Sequence[LogEntry]:
        """Return the stage's log; raise `ArtifactCorruptError` if an entry is lost or damaged."""
        ...

    def logs(self) -> Mapping[str, Sequence[LogEntry] | None]:
        """Return all logs as `entries`, by fingerprint, sorted; None for a damaged one."""
        ...

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
        ...

    def check(self, attempt: Attempt) -> None:
        """Raise `FencedError` unless the attempt's entry is the last one."""
        ...

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Make the *committed* entry; a second call changes nothing.

        Raises:
            FencedError: another attempt took over.
        """
        ...

    def join(self, fingerprint: str, follower: str) -> None:
        """Record that a follower waits; called repeatedly while it waits.

        Raises:
            OSError: not recorded, so others may believe that no follower waits.
        """
        ...

    def leave(self, fingerprint: str, follower: str) -> int:
        """Record that a follower stopped waiting; return how many others wait."""
        ...

    def followed_by(self, follower: str) -> list[str]:
        """Return the fingerprints that a follower joined and did not leave."""
        ...


class LogFiles(Protocol):
    """Raw entries of all logs by fingerprint and number; an entry never changes."""

    def place(self, fingerprint: str) -> str:
        """Return the location of a log, for error messages."""
        ...

    def numbers(self, fingerprint: str) -> list[int]:
        """Return the sorted numbers of a log's entries; empty if there are none."""
        ...

    def all_numbers(self) -> dict[str, list[int]]:
        """Return `numbers` of every log by fingerprint, from one listing."""
        ...

    def read(self, fingerprint: str, number: int) -> bytes:
        """Return the bytes of an existing entry."""
        ...

    def create(self, fingerprint: str, number: int, data: bytes) -> bool:
        """Create a whole entry; return False and change nothing if its number is taken."""
        ...


class LocalLogFiles:
    """`LogFiles` in a directory; an entry is made by `link`, which fails if the name exists."""

    def __init__(self, root: Path) -> None:
        self._stages = root / "stages"

    def place(self, fingerprint: str) -> str:
        """See `LogFiles.place`."""
        return str(self._stages / check_fingerprint(fingerprint))

    def numbers(self, fingerprint: str) -> list[int]:
        """See `LogFiles.numbers`."""
        try:
            found = Path(self.place(fingerprint)).iterdir()
            return sorted(int(path.name) for path in found if path.name.isdigit())
        except FileNotFoundError:
            return []

    def all_numbers(self) -> dict[str, list[int]]:
        """See `LogFiles.all_numbers`."""
        names = (path.name for path in self._stages.glob("*") if not path.name.startswith("."))
        return {name: self.numbers(name) for name in names}

    def read(self, fingerprint: str, number: int) -> bytes:
        """See `LogFiles.read`."""
        return Path(self.place(fingerprint), str(number)).read_bytes()

    def create(self, fingerprint: str, number: int, data: bytes) -> bool:
        """See `LogFiles.create`."""
        directory = Path(self.place(fingerprint))
        make_directories(directory)
        return create_exclusively(directory / str(number), data)


class StageLogs:
    """`Attempts` over log files; `journal_bytes` takes fingerprint and attempt."""

    def __init__(
        self,
        files: LogFiles,
        followers: Followers,
        journal_bytes: Callable[[str, int], int],
    ) -> None:
        self._files = files
        self._journal_bytes = journal_bytes
        self._known: dict[tuple[str, int], LogEntry] = {}
        self.join = followers.join
        self.leave = followers.leave
        self.followed_by = followers.followed_by

    def entries(self, fingerprint: str) -> list[LogEntry]:
        """See `Attempts.entries`."""
        return self._entries(fingerprint, self._files.numbers(fingerprint))

    def logs(self) -> dict[str, list[LogEntry] | None]:
        """See `Attempts.logs`; entries that this process has read before are not read again."""

        def log(found: tuple[str, Sequence[int]]) -> list[LogEntry] | None:
            try:
                return self._entries(*found)
            except ArtifactCorruptError:
                return None

        numbers = self._files.all_numbers()
        with ThreadPoolExecutor(NUM_READERS, "logs") as pool:
            return dict(sorted(zip(numbers, pool.map(log, numbers.items()), strict=True)))

    def _entries(self, fingerprint: str, numbers: Sequence[int]) -> list[LogEntry]:
        if list(numbers) != list(range(len(numbers))):
            place = self._files.place(fingerprint)
            raise ArtifactCorruptError(f"{place} has entries {numbers}; restore the others")
        return [self._entry(fingerprint, number) for number in numbers]

    def hold(
        self,
        fingerprint: str,
        holder: Holder,
        number: int,
        force: str = "",
        adopted: Adoption | None = None,
    ) -> Attempt:
        """See `Attempts.hold`."""
        log = self.entries(fingerprint)
        last = log[number - 1] if 0 < number <= len(log) else None
        if number > len(log):
            raise FencedError(f"{fingerprint[:12]} lost entries before {number} meanwhile")
        goes_on = last if last is not None and last.kind == "held" else None
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
        """See `Attempts.check`."""
        log = self.entries(attempt.fingerprint)
        if len(log) <= attempt.number or log[attempt.number].holder.id != attempt.holder:
            raise FencedError(f"{attempt.fingerprint[:12]}: attempt {attempt.number} is not held")
        if len(log) > attempt.number + 1:
            raise FencedError(_fenced(attempt.fingerprint, attempt.number + 1, log[-1]))

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """See `Attempts.commit`."""
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

    def _counted(self, fingerprint: str, held: LogEntry) -> dict[int, int]:
        """Return the bytes that count of all segments up to that of a *held* entry, inclusive."""
        return {**held.journal, held.number: self._journal_bytes(fingerprint, held.number)}

    def _create(self, fingerprint: str, entry: LogEntry) -> bool:
        return self._files.create(fingerprint, entry.number, canonical_json(entry) + b"\n")

    def _entry(self, fingerprint: str, number: int) -> LogEntry:
        known = self._known.get((fingerprint, number))
        if known is not None:
            return known
        path = f"{self._files.place(fingerprint)}/{number}"
        try:
            entry = LogEntry.model_validate_json(self._files.read(fingerprint, number))
        except ValidationError as error:
            reason = str(error).splitlines()[0]
            raise ArtifactCorruptError(f"{path} is no entry of a stage log: {reason}") from error
        of = entry.record.fingerprint if entry.record is not None else fingerprint
        if entry.number != number or of != fingerprint:
            raise ArtifactCorruptError(f"{path} is entry {entry.number} of {of}")
        self._known[fingerprint, number] = entry
        return entry


def latest_commit(entries: Sequence[LogEntry], force: str = "") -> CommitRecord | None:
    """Return the newest commit record, or None; a `force` token selects its generation."""
    for entry in reversed(entries):
        if entry.record is not None and force in {"", entry.force}:
            return entry.record
    return None


def generation(entries: Sequence[LogEntry], attempt: int | None = None) -> Sequence[LogEntry]:
    """Return the *held* entries of an attempt's generation, and its *committed* one if it exists.

    They share their step checkpoints. None as `attempt` means the newest generation.
    """
    if not entries:
        return ()
    at = len(entries) - 1 if attempt is None else attempt
    adopting = {entry.number for entry in entries if entry.adopted}
    begins = [
        number
        for number in range(len(entries) + 1)
        if number == 0 or number in adopting or entries[number - 1].kind == "committed"
    ]
    start = max(number for number in begins if number <= at)
    return entries[start : min((number for number in begins if number > at), default=None)]


def current_generation(entries: Sequence[LogEntry]) -> int:
    """Return the first attempt's number of the generation in progress, or of the next one."""
    members = generation(entries)
    if not members or members[-1].kind == "committed":
        return len(entries)
    return members[0].number


def journal_segments(entries: Sequence[LogEntry], attempt: int | None = None) -> list[Segment]:
    """Return the journal segments of a generation; arguments as of `generation`."""
    members = generation(entries, attempt)
    counted = members[-1].journal if members else {}
    return [Segment(e.number, counted.get(e.number)) for e in members if e.kind == "held"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _fenced(fingerprint: str, number: int, standing: LogEntry) -> str:
    return (
        f"entry {number} of {fingerprint[:12]} is taken: {standing.kind} by "
        f"{standing.holder.id} ({standing.holder.process}) at {standing.made_at}"
    )
