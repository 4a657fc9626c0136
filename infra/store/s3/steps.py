"""The step checkpoints of one generation, here and in the bucket.

    <steps>/<step>-<digest>/...    files of a checkpoint, its manifest last

Promises: a checkpoint in the bucket is named by its content, so two attempts never mix theirs, and
it is seen when its manifest is there; before that, the journal of the attempt that made it was
shipped, so whoever continues from it lacks no record. What is fetched was verified, byte by byte;
a damaged one costs a warning, and the one before it is taken.
Does not promise: that the newest checkpoint of a machine that is lost had been shipped.
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
"""How long the end of a stage waits for a checkpoint on its way, which nobody needs any more."""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{64})")

_Checkpoint = tuple[int, str]
"""Step, and digest of the manifest."""
_log = logging.getLogger(__name__)


class SharedSteps:
    """A directory of checkpoints, and its place in the bucket.

    Args:
        objects: of the store.
        place: name of the directory in it.
        root: the directory here; may not exist.
    """

    def __init__(self, objects: Objects, place: str, root: Path) -> None:
        self._objects, self._place, self._root = objects, place, root
        self._shipped: set[_Checkpoint] = set()
        self._lock = threading.Lock()

    def numbers(self) -> list[int]:
        """Steps that have a checkpoint here or there, ascending; perhaps none of them is sound."""
        return sorted({step for step, _ in self._visible()} | {*step_directories(self._root)})

    def ship(self, before_manifest: Callable[[], None] = lambda: None) -> None:
        """Ship what is published here; what is older there, and not here any more, goes then.

        Args:
            before_manifest: called before a checkpoint can be seen; what it raises leaves all as
                it is.

        Raises:
            StoreError: the service refused or failed.
        """
        with self._lock:
            here: dict[_Checkpoint, Path] = {}
            for step, paths in step_directories(self._root).items():
                for path in paths:
                    with suppress(ArtifactNotFoundError):  # retention was faster
                        here[step, read_manifest(path).digest] = path
            fresh = [each for each in here if each not in self._shipped]
            for each in fresh:
                self._upload(each, here[each], before_manifest)
            if fresh:
                for each in self._begun():
                    if each not in here and each[0] < max(here)[0]:
                        self._remove(each)

    def fetch(self, last: int) -> None:
        """Bring the newest valid checkpoint here, unless what is here is as new.

        Args:
            last: those of later steps are left where they are.

        Raises:
            StoreError: the service refused or failed.
        """
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
        """Take all of them out of the bucket."""
        for each in self._begun():
            self._remove(each)

    def _begun(self) -> list[_Checkpoint]:
        """What is in the bucket, or on its way, in order."""
        return _parsed(self._objects.children(f"{self._place}/"))

    def _visible(self) -> list[_Checkpoint]:
        """What has its manifest, in order."""
        cut, end = len(self._place) + 1, f"/{MANIFEST_NAME}"
        names = (each.name[cut:] for each in self._objects.listed(f"{self._place}/"))
        return _parsed(name.removesuffix(end) for name in names if name.endswith(end))

    def _upload(self, each: _Checkpoint, path: Path, before_manifest: Callable[[], None]) -> None:
        root = self._name(each)
        try:
            manifest = read_manifest(path)
            for name, entry in manifest.files.items():
                self._objects.upload(path / name, f"{root}/{name}", entry)
        except (ArtifactNotFoundError, FileNotFoundError):  # retention was faster
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
        """First what makes it visible."""
        root = self._name(each)
        self._objects.delete([f"{root}/{MANIFEST_NAME}"])
        self._objects.delete([found.name for found in self._objects.listed(f"{root}/")])

    def _name(self, each: _Checkpoint) -> str:
        return f"{self._place}/{each[0]:08d}-{each[1]}"


class StepsShipper:
    """Ships a directory's checkpoints from a thread, as they are published, until one is fenced.

    Args:
        steps: the directory.
        before_manifest: as of `SharedSteps.ship`.
    """

    def __init__(self, steps: SharedSteps, before_manifest: Callable[[], None]) -> None:
        self._steps, self._before_manifest = steps, before_manifest
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ship no more; what is on its way may take `END_DEADLINE_S`."""
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
