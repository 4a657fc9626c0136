"""The log of a stage: `stages/<fingerprint>/<n>`, the only fence between attempts.

Each entry says *held by X* or *committed D* and is made by one exclusive create, so of any
number of callers exactly one makes entry n. Only the holder of entry n may make the commit
n + 1; whoever finds n + 1 taken is fenced. A *held* after a *committed* is a forced generation.
So is, within one, a *held* that says what it adopts: a generation has one origin.
An entry also says how many bytes of each earlier journal segment of its generation count, so
that what a woken writer appends later never does.

Promises: entries never change; after a kill at any point an entry is there whole or not at all.
Does not promise: to know who is alive. Whoever makes the next *held* has to.
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
from infra.store.followers import Followers
from infra.store.stage_spec import Adoption, CommitRecord, check_fingerprint

NUM_READERS = 8
"""Logs that are read at a time where all of them are."""


class Holder(FrozenModel):
    """Who asked for an attempt."""

    id: str
    """Unlike any other holder's."""
    process: str
    """Stamp of the process that asked (`infra.store.process_stamp`)."""
    ray_job: str = "none"
    """Ray's name of the job that runs it, perhaps after the stage before; `none`: no job of Ray."""
    cluster: str = ""
    """Where that job is known: `infra.ray.jobs.RayJobs.cluster_id`."""


class LogEntry(FrozenModel):
    """One entry of a stage's log."""

    schema_version: int = 1
    kind: Literal["held", "committed"]
    number: int
    """Its place in the log; that of a *held* is also the number of the attempt."""
    holder: Holder
    host: str = ""
    """Where its maker ran, for people."""
    force: str = ""
    """The token that asked for this generation; empty for the first one."""
    adopted: Adoption | None = None
    """Of a *held* that begins a generation: whose work its attempts continue."""
    journal: dict[int, int] = {}
    """By attempt, the bytes that count of the generation's journal segments before this entry."""
    record: CommitRecord | None = None
    """Of a *committed*."""
    made_at: str
    """UTC, for people; nothing is decided by it."""


@dataclass(frozen=True)
class Attempt:
    """The right to commit entry `number` + 1.

    Attributes:
        fingerprint: of the stage.
        number: of the *held* entry.
        holder: id of who has it.
    """

    fingerprint: str
    number: int
    holder: str


class Segment(NamedTuple):
    """What counts of one attempt's journal."""

    attempt: int
    num_bytes: int | None
    """None while the attempt may still append."""


class Attempts(Protocol):
    """Who works on a stage, wherever the store is."""

    def entries(self, fingerprint: str) -> Sequence[LogEntry]:
        """The stage's log from its beginning.

        Args:
            fingerprint: of the stage.

        Returns:
            All entries; none if nobody ever asked for the stage.

        Raises:
            ArtifactCorruptError: an entry is missing in the middle, or does not parse.
        """
        ...

    def logs(self) -> Mapping[str, Sequence[LogEntry] | None]:
        """All logs by fingerprint, sorted, as `entries`; None of one that is damaged."""
        ...

    def hold(
        self,
        fingerprint: str,
        holder: Holder,
        number: int,
        force: str = "",
        adopted: Adoption | None = None,
    ) -> Attempt:
        """Make the *held* entry of a number; the caller knows that what it follows is over.

        Args:
            fingerprint: of the stage.
            holder: who wants it.
            number: the length of the log as the caller saw it.
            force: of a new generation; until there is a commit, the token of the first is kept.
            adopted: whose work the attempt continues; begins a generation.

        Returns:
            The right to commit the next entry.

        Raises:
            FencedError: someone else made that entry, or the log before it was taken away.
        """
        ...

    def check(self, attempt: Attempt) -> None:
        """Raise `FencedError` unless the attempt's entry is the last one."""
        ...

    def commit(self, attempt: Attempt, record: CommitRecord) -> CommitRecord:
        """Make the *committed* entry behind the attempt's; a second call changes nothing.

        Args:
            attempt: what `hold` gave.
            record: names an artifact that was published before.

        Returns:
            The record.

        Raises:
            FencedError: another attempt took over.
        """
        ...

    def join(self, fingerprint: str, follower: str) -> None:
        """Say that someone waits for the stage's result; said again while the wait goes on.

        Args:
            fingerprint: of the stage.
            follower: names who waits.

        Raises:
            OSError: it could not be said, so others may believe that nobody waits.
        """
        ...

    def leave(self, fingerprint: str, follower: str) -> int:
        """Say that someone waits no more.

        Args:
            fingerprint: of the stage.
            follower: names who waited.

        Returns:
            How many others wait.
        """
        ...

    def followed_by(self, follower: str) -> list[str]:
        """Fingerprints that a follower joined and did not leave."""
        ...


class LogFiles(Protocol):
    """The entries of all logs as bytes, by fingerprint and number; none of them ever changes."""

    def place(self, fingerprint: str) -> str:
        """Where a log is, for error lines."""
        ...

    def numbers(self, fingerprint: str) -> list[int]:
        """Those that are taken, sorted; none if nobody ever asked for the stage."""
        ...

    def all_numbers(self) -> dict[str, list[int]]:
        """Those that are taken, sorted, by fingerprint: of every log, by one look."""
        ...

    def read(self, fingerprint: str, number: int) -> bytes:
        """An entry that is there."""
        ...

    def create(self, fingerprint: str, number: int, data: bytes) -> bool:
        """Make an entry, whole; False if its number is taken, and then it stays as it is."""
        ...


class LocalLogFiles:
    """`LogFiles` in a directory: an entry is made by `link`, which fails where a name is taken.

    Args:
        root: of the store.
    """

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
    """`Attempts` on logs wherever they are.

    Args:
        files: the entries.
        followers: who waits for what.
        journal_bytes: how many bytes of complete records an attempt's journal segment has now,
            by fingerprint and attempt.
    """

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
        """See `Attempts.logs`. What this process has read before is not read again."""

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
        """What counts of the segments up to that of a *held* entry, its own as it is now."""
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
    """The commit that stands.

    Args:
        entries: of a log.
        force: only a commit of the generation that this token asked for; empty: any.

    Returns:
        Its record; None if there is none yet.
    """
    for entry in reversed(entries):
        if entry.record is not None and force in {"", entry.force}:
            return entry.record
    return None


def generation(entries: Sequence[LogEntry], attempt: int | None = None) -> Sequence[LogEntry]:
    """The attempts that share their steps, and their *committed* entry.

    Args:
        entries: of a log.
        attempt: one of the generation; by default the newest.

    Returns:
        *held* entries in order, and the *committed* one if it is there; empty for an empty log.
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
    """Number of the first attempt of the generation that is under way, or that would be next."""
    members = generation(entries)
    if not members or members[-1].kind == "committed":
        return len(entries)
    return members[0].number


def journal_segments(entries: Sequence[LogEntry], attempt: int | None = None) -> list[Segment]:
    """What the journal of a generation consists of; arguments as of `generation`."""
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
