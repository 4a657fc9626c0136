"""What lies in a store, how large it is, and how it is taken away while others work there.

Promises: nothing goes that somebody is found to need, or begins to need meanwhile; a kill at any
point leaves a store in which every stage is done, or not at all.
Does not promise: sizes to the block. What hard links share, with a registry for one, is counted
here, and is free only when the last of them is gone.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.faults import fault
from infra.store.atomic import TEMPORARY_PREFIX, fsync_directory, is_abandoned, temporary_sibling


@dataclass(frozen=True)
class Stored:
    """Something in a store.

    Attributes:
        place: names it there.
        size_bytes: of its files.
        touched_at: when the newest of them changed; seconds since the epoch.
    """

    place: str
    size_bytes: int
    touched_at: float


@dataclass(frozen=True)
class StoredStage:
    """What a store has of a stage.

    Attributes:
        log: of no bytes where it has none.
        work: what its attempts left; of no bytes where nothing is there.
        steps: step checkpoints by generation, which are a part of the work.
    """

    log: Stored
    work: Stored
    steps: tuple[Stored, ...]

    @property
    def touched_at(self) -> float:
        """When somebody last wrote to it; seconds since the epoch."""
        return max(self.log.touched_at, self.work.touched_at)


class Inventory(Protocol):
    """A store as its garbage collector sees it, wherever its bytes are."""

    @property
    def others_wait(self) -> bool:
        """Whether who begins to need something while `exclusively` lasts looks again after it.

        Then all that counts was said before it began.
        """
        ...

    def stages(self) -> dict[str, StoredStage]:
        """All that have a log or work, by fingerprint, sorted; one look for all of them."""
        ...

    def artifacts(self) -> dict[str, list[Stored]]:
        """By digest; equal content may have several kinds."""
        ...

    def leftovers(self) -> list[Stored]:
        """What writers that are dead, or long silent, had not finished, and damaged copies."""
        ...

    def exclusively(self) -> AbstractContextManager[None]:
        """For whoever takes things away; others may have to wait for its end.

        Returns:
            The time that it lasts.

        Raises:
            StoreError: another collector is at work there.
        """
        ...

    def take(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """Take something away, unless it is needed.

        Args:
            place: of a `Stored`.
            is_needed: asked when nobody finds the thing any more, or begins to need it, with the
                time at which it was changed last itself; if so it is there as before.

        Returns:
            Whether it is gone.

        Raises:
            NotExclusiveError: `exclusively` does not last, or lasts no more.
            OSError: some of it could not be removed; nobody takes it for whole any more.
        """
        ...


class LocalInventory:
    """`Inventory` of a store in a directory (`infra.store.storage.LocalStorage`).

    Args:
        root: of the store.
    """

    others_wait = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def stages(self) -> dict[str, StoredStage]:
        """See `Inventory.stages`."""
        found = [*self._root.glob("stages/*"), *self._root.glob("work/*")]
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
        """See `Inventory.exclusively`. A name goes in one step, so that nobody has to wait."""
        return nullcontext()

    def take(self, place: str, is_needed: Callable[[float], bool]) -> bool:
        """See `Inventory.take`."""
        path = self._root / place
        trash = temporary_sibling(path)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return True
        fsync_directory(path.parent)
        fault("garbage.taken")
        if is_needed(trash.lstat().st_mtime):
            # Whoever made another in between has what he needs; this one goes with the leftovers.
            with suppress(OSError):
                trash.rename(path)
                return False
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
    """A file, or a directory and what is below it and finished; less what goes away meanwhile."""
    yield path
    with suppress(FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            for each in path.iterdir():
                if not each.name.startswith(TEMPORARY_PREFIX):
                    yield from _walk(each)
