"""Ships the files that an attempt writes on one machine to the bucket, where watchers read them.

    <attempt>/heartbeat, stacks.txt    replaced whenever they changed
              samples/<step>.json      likewise
              journal/<offset>         chunks of whole lines that start at that byte

Promises: chunks never change and have no gaps, so joined they are the beginning of the journal.
`ship` returns when everything written before is in the bucket; a thread also ships every
`SHIP_EVERY_S`. A failing service costs only a warning and missing beats. A journal continued on
another machine begins with what was shipped.
Does not promise: lines written since the last shipment to a lost machine; their steps are repeated.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from infra.errors import ArtifactCorruptError, PipelineError
from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.s3.objects import Objects
from infra.store.work_channel import SAMPLES_DIR

SHIP_EVERY_S = 2.0
JOURNAL_NAME = "journal.jsonl"
_REPLACED = ("heartbeat", "stacks.txt")

_log = logging.getLogger(__name__)
_mirrors: dict[Path, "Mirror"] = {}
_opening = threading.Lock()


class Chunk(NamedTuple):
    """A part of a journal."""

    offset: int
    num_bytes: int


class Stretch(NamedTuple):
    """Bytes `start` to `end` of a chunk, both counted from the beginning of the chunk."""

    chunk: Chunk
    start: int
    end: int


class JournalChunks:
    """The shipped part of one journal; thread-safe for readers."""

    def __init__(self, objects: Objects, attempt: str) -> None:
        self._objects = objects
        self._root = f"{attempt}/journal"
        self._known: list[Chunk] = []
        self._lock = threading.Lock()

    def refresh(self) -> Sequence[Chunk]:
        """Return all chunks in order; raise `ArtifactCorruptError` if one is missing."""
        with self._lock:
            after = self._name(self._known[-1].offset) if self._known else ""
            for each in self._objects.listed(f"{self._root}/", after):
                chunk = Chunk(int(each.name.rpartition("/")[2]), each.size_bytes)
                if chunk.offset != self.num_bytes:
                    raise ArtifactCorruptError(
                        f"{self._objects.place(each.name)}: bytes from {self.num_bytes} on are "
                        "missing"
                    )
                self._known.append(chunk)
            return tuple(self._known)

    @property
    def num_bytes(self) -> int:
        """Total size of all known chunks."""
        return sum(self._known[-1]) if self._known else 0

    def read(self, start: int, end: int | None) -> bytes:
        """Return bytes `start` to `end`, fewer if the shipped part is shorter."""
        return b"".join(map(self._read, stretches(self.refresh(), start, end)))

    def append(self, data: bytes) -> None:
        """Ship whole lines; `ArtifactCorruptError` if another writer shipped different ones."""
        name = self._name(self.num_bytes)
        if self._objects.create(name, data):
            self._known.append(Chunk(self.num_bytes, len(data)))
            return
        # Another process of this machine ships the same file and was faster.
        standing = self._objects.get(name)
        if not standing or not (data.startswith(standing) or standing.startswith(data)):
            raise ArtifactCorruptError(f"{self._objects.place(name)} is of another journal")
        self._known.append(Chunk(self.num_bytes, len(standing)))

    def _read(self, stretch: Stretch) -> bytes:
        return self._objects.part(self._name(stretch.chunk.offset), stretch.start, stretch.end)

    def _name(self, offset: int) -> str:
        return f"{self._root}/{offset:016d}"


class Mirror:
    """Ships one attempt's directory; restores the shipped journal if the directory has none."""

    def __init__(self, objects: Objects, attempt: str, directory: Path) -> None:
        self._objects, self._attempt, self._directory = objects, attempt, directory
        self._chunks = JournalChunks(objects, attempt)
        self._shipped: dict[str, bytes] = {}
        self._sampled: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        make_directories(directory)
        if self._chunks.refresh() and not (directory / JOURNAL_NAME).exists():
            atomic_write_bytes(directory / JOURNAL_NAME, self._chunks.read(0, None))
        threading.Thread(target=self._run, name="mirror", daemon=True).start()
        atexit.register(self._ship_or_warn)

    def ship(self) -> None:
        """Ship what is new.

        Raises:
            StoreError: a part could not be shipped.
            ArtifactCorruptError: another writer ships a different journal of the same attempt.
        """
        with self._lock:
            self._ship_journal()
            for name in _REPLACED:
                data = _read_from(self._directory / name, 0)
                if data and data != self._shipped.get(name):
                    self._objects.put(f"{self._attempt}/{name}", data)
                    self._shipped[name] = data
            for path in sorted((self._directory / SAMPLES_DIR).glob("*.json")):
                written_at = path.stat().st_mtime_ns
                if self._sampled.get(path.name) != written_at:
                    name = f"{self._attempt}/{SAMPLES_DIR}/{path.name}"
                    self._objects.put(name, path.read_bytes())
                    self._sampled[path.name] = written_at

    def end(self) -> None:
        """Stop the automatic shipping."""
        self._ended.set()
        atexit.unregister(self._ship_or_warn)

    def _ship_journal(self) -> None:
        data = _read_from(self._directory / JOURNAL_NAME, self._chunks.num_bytes)
        # Whole lines only: chunks never change, but a torn tail is cut when the journal reopens.
        lines = data[: data.rfind(b"\n") + 1]
        if lines:
            self._chunks.append(lines)

    def _run(self) -> None:
        while not self._ended.wait(SHIP_EVERY_S):
            self._ship_or_warn()

    def _ship_or_warn(self) -> None:
        try:
            self.ship()
        except (PipelineError, OSError) as error:
            _log.warning("what %s says does not reach its watchers: %s", self._directory, error)


def mirror(objects: Objects, attempt: str, directory: Path) -> Mirror:
    """Return this process's only mirror of a directory, created on first use."""
    with _opening:
        if directory not in _mirrors:
            _mirrors[directory] = Mirror(objects, attempt, directory)
        return _mirrors[directory]


def ship(directory: Path) -> None:
    """Ship a directory if this process mirrors it; raises as `Mirror.ship`."""
    known = _mirrors.get(directory)
    if known is not None:
        known.ship()


def end(directory: Path) -> None:
    """Stop mirroring a directory, if this process does."""
    with _opening:
        known = _mirrors.pop(directory, None)
    if known is not None:
        known.end()


def end_below(directory: Path) -> None:
    """Stop mirroring every directory below a directory."""
    for path in [path for path in _mirrors if path.is_relative_to(directory)]:
        end(path)


def stretches(chunks: Sequence[Chunk], start: int, end: int | None) -> list[Stretch]:
    """Return the parts of gapless chunks that hold bytes `start` to `end` (None: all the rest)."""
    found = []
    for chunk in chunks:
        first = max(start - chunk.offset, 0)
        last = chunk.num_bytes if end is None else min(end - chunk.offset, chunk.num_bytes)
        if first < last:
            found.append(Stretch(chunk, first, last))
    return found


def _read_from(path: Path, start: int) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        return file.read()
    return b""
