"""The step checkpoints of one generation, on this machine and in the bucket.

    <steps>/<step>-<digest>/...    files of a checkpoint, its manifest last

Promises: a checkpoint in the bucket is named by its content, so two attempts never mix theirs. It
is visible once its manifest exists; the journal of its attempt was shipped before, so an attempt
that continues from it misses no record. Every fetched byte is verified; a damaged checkpoint costs
a warning, and the previous one is used.
Does not promise: that the newest checkpoint of a lost machine was shipped.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from infra.errors import (
    ArtifactCorruptError,
    ArtifactNotFoundError,
    FencedError,
    PipelineError,
)
from infra.store.artifacts import (
    MANIFEST_NAME,
    parse_manifest,
    read_manifest,
)
from infra.store.atomic import make_directories, publish_directory
from infra.store.s3.download import download
from infra.store.s3.objects import Objects
from infra.store.step_directories import STEP_KIND, newest_valid, step_directories

SHIP_EVERY_S = 2.0
END_DEADLINE_S = 60.0
"""How long the end of a stage waits for an upload that is not needed any more."""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})")

_Checkpoint = tuple[int, str]  # step, and digest of the manifest
_log = logging.getLogger(__name__)


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
        try:
            own = newest_valid(self._root, last)
        except ArtifactCorruptError:
            own = None
        for each in reversed(self._visible()):
            if each[0] > last:
                continue
            if own is not None and own[0] >= each[0]:
                return
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
        cut, end = len(self._place) + 1, f"/{MANIFEST_NAME}"
        names = (each.name[cut:] for each in self._objects.listed(f"{self._place}/"))
        return _parsed(name.removesuffix(end) for name in names if name.endswith(end))

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
        place = self._objects.place(f"{root}/{MANIFEST_NAME}")
        data = self._objects.get(f"{root}/{MANIFEST_NAME}")
        if data is None:
            raise ArtifactNotFoundError(f"{place} was removed")
        manifest = parse_manifest(data, place, STEP_KIND)
        if manifest.digest != digest:
            raise ArtifactCorruptError(f"{place} is that of {manifest.digest}")
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
        self._objects.delete([found.name for found in self._objects.listed(f"{root}/")])

    def _name(self, each: _Checkpoint) -> str:
        return f"{self._place}/{each[0]:08d}-{each[1]}"


class StepsShipper:
    """Ships checkpoints from a thread as they are published, until the attempt is fenced."""

    def __init__(self, steps: SharedSteps, before_manifest: Callable[[], None]) -> None:
        self._steps, self._before_manifest = steps, before_manifest
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop shipping; an upload in progress may take `END_DEADLINE_S`."""
        self._ended.set()
        self._thread.join(END_DEADLINE_S)

    def _run(self) -> None:
        while not self._ended.wait(SHIP_EVERY_S):
            try:
                self._steps.ship(self._before_manifest)
            except FencedError as error:
                _log.warning("no more checkpoints go to the store: %s", error)
                return
            except (PipelineError, OSError) as error:
                _log.warning("the newest checkpoint does not reach the store yet: %s", error)


def _parsed(names: Iterable[str]) -> list[_Checkpoint]:
    found = map(_NAME.fullmatch, names)
    return sorted((int(match[1]), match[2]) for match in found if match)
