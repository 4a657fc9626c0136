"""Lists what a store contains, with sizes, and removes it while others use the store.

Promises: nothing is removed that is needed or becomes needed meanwhile; a kill at any moment leaves
a store in which every stage is either done or not done.
Does not promise: exact sizes. A hard-linked file is counted, but freed only with its last link.
"""

import errno
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from infra.faults import fault
from infra.store.atomic import TEMPORARY_PREFIX, fsync_directory, is_abandoned, temporary_sibling

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
"""The target of a rename was created meanwhile; then the old thing is removed."""


@dataclass(frozen=True)
class Stored:
    """A file, directory or upload; `touched_at` is its last change in seconds since the epoch."""

    place: str
    size_bytes: int
    touched_at: float


@dataclass(frozen=True)
class StoredStage:
    """A stage's log and working files (0 bytes if absent); `work` includes `steps`, checkpoints."""

    log: Stored
    work: Stored
    steps: tuple[Stored, ...]

    @property
    def touched_at(self) -> float:
        """Time of the last write to the stage; seconds since the epoch."""
        return max(self.log.touched_at, self.work.touched_at)


class Inventory(ABC):
    """Lists and removes the contents of a store, for the garbage collector."""

    others_wait: bool
    """True if new users wait for `exclusively` to end, so later uses need not be checked."""

    @abstractmethod
    def stages(self) -> dict[str, StoredStage]:
        """Return all stages with a log or working files, by fingerprint, sorted."""

    @abstractmethod
    def artifacts(self) -> dict[str, list[Stored]]:
        """Return the stored copies of each artifact, by digest."""

    @abstractmethod
    def leftovers(self) -> list[Stored]:
        """Return unfinished files of dead or long silent writers, and damaged copies."""

    @abstractmethod
    def exclusively(self) -> AbstractContextManager[None]:
        """Return the context for `remove_unless`; `StoreError` if another collector is active."""

    @abstractmethod
    def remove_unless(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """Remove the `Stored` at a place unless it is needed; return True if it is gone.

        `is_needed` gets the time of the last change, when no new user can reach the thing any more;
        if it returns True, the thing stays as it was.

        Raises:
            NotExclusiveError: the context of `exclusively` is not active, or was lost.
            OSError: a part could not be removed; readers do not see the rest as complete.
        """


class LocalInventory(Inventory):
    """`Inventory` of a store in a directory (`infra.store.storage.LocalStorage`)."""

    others_wait = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def stages(self) -> dict[str, StoredStage]:
        """See `Inventory.stages`."""
        found = (*self._root.glob("stages/*"), *self._root.glob("work/*"))
        names = sorted({path.name for path in found if not path.name.startswith(".")})
        return {name: self._stage(name) for name in names}

    def artifacts(self) -> dict[str, list[Stored]]:
        """See `Inventory.artifacts`."""
        found: dict[str, list[Stored]] = {}
        for path in self._root.glob("artifacts/*/*"):
            if not path.name.startswith("."):
                found.setdefault(path.name, []).append(self._stored(path, own_time=True))
        return found

    def leftovers(self) -> list[Stored]:
        """See `Inventory.leftovers`."""
        hidden = [
            path
            for pattern in ("stages/.*", "work/.*", "work/*/.*", "artifacts/*/.*")
            for path in self._root.glob(pattern)
        ]
        return [self._stored(path) for path in sorted(hidden) if is_abandoned(path)]

    def exclusively(self) -> AbstractContextManager[None]:
        """See `Inventory.exclusively`; does nothing, since a rename hides a thing in one step."""
        return nullcontext()

    def remove_unless(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """See `Inventory.remove_unless`."""
        path = self._root / place
        trash = temporary_sibling(path)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return True
        fsync_directory(path.parent)
        fault("garbage.taken")
        if is_needed(trash.lstat().st_mtime):
            try:
                trash.rename(path)
                return False
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise OSError(
                        error.errno,
                        f"{error.strerror}: {trash} is needed; rename it to {path.name} before the "
                        "next collection",
                    ) from error
        if trash.is_dir():
            shutil.rmtree(trash)
        else:
            trash.unlink(missing_ok=True)
        return True

    def _stage(self, fingerprint: str) -> StoredStage:
        work = self._root / "work" / fingerprint
        steps = tuple(self._stored(path) for path in sorted(work.glob("steps-*")))
        log = self._stored(self._root / "stages" / fingerprint)
        return StoredStage(log, self._stored(work), steps)

    def _stored(self, path: Path, *, own_time: bool = False) -> Stored:
        size_bytes, touched_at = 0, 0.0
        for each in _walk(path):
            with suppress(FileNotFoundError):
                state = each.lstat()
                if each == path or not own_time:
                    touched_at = max(touched_at, state.st_mtime)
                size_bytes += 0 if each.is_dir() else state.st_size
        return Stored(str(path.relative_to(self._root)), size_bytes, touched_at)


def _walk(path: Path) -> Iterator[Path]:
    yield path
    with suppress(FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            for each in path.iterdir():
                if not each.name.startswith(TEMPORARY_PREFIX):
                    yield from _walk(each)
