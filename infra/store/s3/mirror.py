"""Ships what an attempt writes on one machine to the bucket, where watchers and successors read it.

    <attempt>/heartbeat, stacks.txt    replaced whenever they changed
              samples/<step>.json      likewise
              journal/<offset>         chunks of whole lines that start at that byte
    <steps>/<step>-<digest>/...        files of a step checkpoint, its manifest last

Promises: chunks never change and have no gaps, so joined they are the beginning of the journal.
`ship` returns when everything written before is in the bucket; a thread also ships every
`SHIP_EVERY_S`. A failing service costs only a warning and missing beats. A journal continued on
another machine begins with what was shipped. A checkpoint in the bucket is named by its content, so
two attempts never mix theirs. It is visible once its manifest exists; the journal of its attempt
was shipped before, so an attempt that continues from it misses no record. Every fetched byte is
verified; a damaged checkpoint costs a warning, and the previous one is used.
Does not promise: lines and checkpoints written since the last shipment to a lost machine; their
steps are repeated.
"""

import atexit
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from infra.errors import (
    ArtifactCorruptError,
    ArtifactNotFoundError,
    FencedError,
    PipelineError,
)
from infra.store.artifacts import MANIFEST_NAME, read_manifest
from infra.store.atomic import atomic_write_bytes, make_directories, publish_directory
from infra.store.files import read_stretch
from infra.store.s3.cache import download
from infra.store.s3.objects import Objects
from infra.store.step_directories import STEP_KIND, newest_valid, step_directories
from infra.store.work_channel import SAMPLES_DIR
from infra.waiting import Repeated

SHIP_EVERY_S = 2.0
JOURNAL_NAME = "journal.jsonl"
_REPLACED = ("heartbeat", "stacks.txt")
END_DEADLINE_S = 60.0
"""How long the end of a stage waits for an upload that is not needed any more."""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})")

_Checkpoint = tuple[int, str]  # step, and digest of the manifest

_log = logging.getLogger(__name__)
_mirrors: dict[Path, "Mirror"] = {}
_opening = threading.Lock()


class Chunk(NamedTuple):
    """A part of a journal."""

    offset: int
    num_bytes: int


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
        return b"".join(
            self._objects.part(self._name(chunk.offset), first, last)
            for chunk, first, last in stretches(self.refresh(), start, end)
        )

    def append(self, data: bytes) -> None:
        """Ship whole lines; `ArtifactCorruptError` if another writer shipped different ones."""
        name = self._name(self.num_bytes)
        # Another process of this machine may ship the same file, and be faster.
        standing = data if self._objects.create(name, data) else self._objects.get(name)
        if not standing or not (data.startswith(standing) or standing.startswith(data)):
            raise ArtifactCorruptError(f"{self._objects.place(name)} belongs to another journal")
        self._known.append(Chunk(self.num_bytes, len(standing)))

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
        make_directories(directory)
        if self._chunks.refresh() and not (directory / JOURNAL_NAME).exists():
            atomic_write_bytes(directory / JOURNAL_NAME, self._chunks.read(0, None))
        self._shipments = Repeated(self._ship_or_warn, SHIP_EVERY_S, "mirror")
        atexit.register(self._ship_or_warn)

    def ship(self) -> None:
        """Ship what is new.

        Raises:
            StoreError: a part could not be shipped.
            ArtifactCorruptError: another writer ships a different journal of the same attempt.
        """
        with self._lock:
            data = read_stretch(self._directory / JOURNAL_NAME, self._chunks.num_bytes)
            # Whole lines: chunks never change, but a torn tail is cut when the journal reopens.
            if lines := data[: data.rfind(b"\n") + 1]:
                self._chunks.append(lines)
            for name in _REPLACED:
                data = read_stretch(self._directory / name)
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
        self._shipments.end()
        atexit.unregister(self._ship_or_warn)

    def _ship_or_warn(self) -> None:
        try:
            self.ship()
        except (PipelineError, OSError) as error:
            _log.warning("cannot upload the records of %s: %s", self._directory, error)


def mirror(objects: Objects, attempt: str, directory: Path) -> Mirror:
    """Return this process's only mirror of a directory, created on first use."""
    with _opening:
        if directory not in _mirrors:
            _mirrors[directory] = Mirror(objects, attempt, directory)
        return _mirrors[directory]


def ship(directory: Path) -> None:
    """Ship a directory if this process mirrors it; raises as `Mirror.ship`."""
    if known := _mirrors.get(directory):
        known.ship()


def end(directory: Path) -> None:
    """Stop mirroring a directory, if this process does."""
    with _opening:
        known = _mirrors.pop(directory, None)
    if known:
        known.end()


def end_below(directory: Path) -> None:
    """Stop mirroring every directory below a directory."""
    for path in [path for path in _mirrors if path.is_relative_to(directory)]:
        end(path)


def stretches(
    chunks: Sequence[Chunk], start: int, end: int | None
) -> Iterator[tuple[Chunk, int, int]]:
    """Yield the chunks that hold bytes `start` to `end` (None: all the rest) of a journal.

    Each comes with the first and the last byte wanted of it, counted from its own beginning.
    """
    for chunk in chunks:
        first = max(start - chunk.offset, 0)
        last = chunk.num_bytes if end is None else min(end - chunk.offset, chunk.num_bytes)
        if first < last:
            yield chunk, first, last


class SharedSteps:
    """A local directory of checkpoints, which may not exist, and its place in the bucket."""

    def __init__(self, objects: Objects, place: str, root: Path) -> None:
        self._objects, self._place, self._root = objects, place, root
        self._shipped: set[_Checkpoint] = set()
        self._lock = threading.Lock()

    def numbers(self) -> list[int]:
        """Return the steps with a checkpoint here or in the bucket, ascending; not verified."""
        return sorted({step for step, _ in self._visible()} | {*step_directories(self._root)})

    def ship(self, before_manifest: Callable[[], None] = lambda: None) -> None:
        """Upload local checkpoints; remove older ones in the bucket that are not local any more.

        `before_manifest` is called before a checkpoint becomes visible; an exception prevents that.
        """
        with self._lock:
            here: dict[_Checkpoint, Path] = {}
            for step, paths in step_directories(self._root).items():
                for path in paths:
                    with suppress(ArtifactNotFoundError):  # retention removed it meanwhile
                        here[step, read_manifest(path).digest] = path
            fresh = [each for each in here if each not in self._shipped]
            for each in fresh:
                self._upload(each, here[each], before_manifest)
            if fresh:
                for each in self._begun():
                    if each not in here and each[0] < max(here)[0]:
                        self._remove(each)

    def fetch(self, last: int) -> None:
        """Download the newest valid checkpoint up to step `last`, unless the local is as new."""
        own = None
        with suppress(ArtifactCorruptError):
            own = newest_valid(self._root, last)
        own_step = own[0] if own else -1
        newer = [each for each in self._visible() if own_step < each[0] <= last]
        for each in reversed(newer):
            try:
                self._download(each)
            except (ArtifactNotFoundError, ArtifactCorruptError) as error:
                _log.warning("skipping the checkpoint of step %d: %s", each[0], error)
            else:
                return

    def remove(self) -> None:
        """Remove all of them from the bucket."""
        for each in self._begun():
            self._remove(each)

    def _begun(self) -> list[_Checkpoint]:  # partial uploads included
        return _parsed(self._objects.children(f"{self._place}/"))

    def _visible(self) -> list[_Checkpoint]:  # those with a manifest
        paths = (PurePosixPath(each.name) for each in self._objects.listed(f"{self._place}/"))
        return _parsed(path.parent.name for path in paths if path.name == MANIFEST_NAME)

    def _upload(self, each: _Checkpoint, path: Path, before_manifest: Callable[[], None]) -> None:
        root = self._name(each)
        try:
            manifest = read_manifest(path)
            for name, entry in manifest.files.items():
                self._objects.upload(path / name, f"{root}/{name}", entry)
        except (ArtifactNotFoundError, FileNotFoundError):  # retention removed it meanwhile
            self._remove(each)
            return
        before_manifest()
        self._objects.create(f"{root}/{MANIFEST_NAME}", manifest.to_bytes())
        self._shipped.add(each)

    def _download(self, each: _Checkpoint) -> None:
        step, digest = each
        root = self._name(each)
        manifest = self._objects.manifest(root, STEP_KIND, digest)
        unfinished = self._root / f".part-{digest}"
        make_directories(unfinished)
        download(unfinished, manifest, lambda name, *at: self._objects.part(f"{root}/{name}", *at))
        final = self._root / f"step-{step:08d}"
        if final.exists():  # damaged
            final = final.with_name(f"{final.name}-{digest[:12]}")
        publish_directory(unfinished, final)
        self._shipped.add(each)

    def _remove(self, each: _Checkpoint) -> None:
        """Delete the manifest first, so that no partial checkpoint is visible."""
        root = self._name(each)
        self._objects.delete([f"{root}/{MANIFEST_NAME}"])
        self._objects.remove(root)

    def _name(self, each: _Checkpoint) -> str:
        return f"{self._place}/{each[0]:08d}-{each[1]}"


def share(steps: SharedSteps, before_manifest: Callable[[], None]) -> Repeated:
    """Ship checkpoints from a thread as they are published, until the attempt is fenced."""

    def ship_new() -> bool:
        try:
            steps.ship(before_manifest)
        except FencedError as error:
            _log.warning("no more checkpoints go to the store: %s", error)
            return True
        except (PipelineError, OSError) as error:
            _log.warning("the newest checkpoint does not reach the store yet: %s", error)
        return False

    return Repeated(ship_new, SHIP_EVERY_S, "steps")


def _parsed(names: Iterable[str]) -> list[_Checkpoint]:
    return sorted((int(match[1]), match[2]) for match in map(_NAME.fullmatch, names) if match)
