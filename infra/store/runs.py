"""Which pipeline runs use which stages and read what: `runs/<key>/`, a directory for each run.

    runs/<key>/name                    what people call it
    runs/<key>/stages/<fingerprint>    touched whenever the run asks for the stage
    runs/<key>/artifacts/<digest>      of the store, which the run reads as if it lay elsewhere
    runs/<key>/kept                    a person wants to keep what the run used

Promises: a run says that it uses a stage before it looks whether the stage is done; so whoever
takes the stage away and looks here afterwards sees the use, or the run sees that it is gone.
The same of what it reads.
Does not promise: that a use outlives a power loss that came with it.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.store.atomic import atomic_write_bytes, make_directories
from infra.store.stage_spec import check_fingerprint

_NAME, _KEPT, _STAGES, _ARTIFACTS = "name", "kept", "stages", "artifacts"


@dataclass(frozen=True)
class KnownRun:
    """A pipeline run that used a store.

    Attributes:
        key: identifies it; a repetition of the same run has the same.
        name: for people.
        kept: somebody asked to keep what it used.
        used_at: by fingerprint, when it last asked for the stage; seconds since the epoch.
        read_at: by digest, when it last said that it reads an artifact that no stage of it made;
            seconds since the epoch.
    """

    key: str
    name: str
    kept: bool
    used_at: Mapping[str, float]
    read_at: Mapping[str, float]

    @property
    def spoke_at(self) -> float:
        """When it last said that it needs something; seconds since the epoch."""
        return max((*self.used_at.values(), *self.read_at.values()), default=0.0)


class Runs(Protocol):
    """The runs that use a store, wherever its bytes are."""

    def begin(self, key: str, name: str) -> None:
        """Say that there is a run.

        Args:
            key: sha256 that identifies it.
            name: for people.
        """
        ...

    def use(self, key: str, fingerprint: str) -> None:
        """Say that a run uses a stage, before the stage is looked up."""
        ...

    def read(self, key: str, digest: str) -> None:
        """Say that a run reads an artifact of the store that no stage of it made."""
        ...

    def keep(self, key: str, kept: bool) -> None:
        """Keep what a run used and read, however long ago, or keep it no longer."""
        ...

    def known(self) -> list[KnownRun]:
        """All of them, sorted by name and key."""
        ...

    def forget(self, key: str) -> None:
        """Take a run's record away; may be absent."""
        ...


class LocalRuns:
    """`Runs` in a directory.

    Args:
        root: of the store.
    """

    def __init__(self, root: Path) -> None:
        self._runs = root / "runs"

    def begin(self, key: str, name: str) -> None:
        """See `Runs.begin`."""
        path = self._directory(key) / _NAME
        if not path.exists():
            make_directories(path.parent)
            atomic_write_bytes(path, name.encode())

    def use(self, key: str, fingerprint: str) -> None:
        """See `Runs.use`."""
        self._touch(key, _STAGES, fingerprint)

    def read(self, key: str, digest: str) -> None:
        """See `Runs.read`."""
        self._touch(key, _ARTIFACTS, digest)

    def keep(self, key: str, kept: bool) -> None:
        """See `Runs.keep`."""
        path = self._directory(key) / _KEPT
        if kept:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def known(self) -> list[KnownRun]:
        """See `Runs.known`."""
        found = {p.parent for what in (_STAGES, _ARTIFACTS) for p in self._runs.glob(f"*/{what}")}
        return sorted(map(_read, found), key=lambda run: (run.name, run.key))

    def forget(self, key: str) -> None:
        """See `Runs.forget`."""
        shutil.rmtree(self._directory(key), ignore_errors=True)

    def _touch(self, key: str, what: str, name: str) -> None:
        path = self._directory(key) / what / check_fingerprint(name)
        make_directories(path.parent)
        path.touch()

    def _directory(self, key: str) -> Path:
        return self._runs / check_fingerprint(key)


def _read(directory: Path) -> KnownRun:
    """What a directory says; of a run that is just being forgotten perhaps the half."""
    used_at, read_at = _touched_at(directory / _STAGES), _touched_at(directory / _ARTIFACTS)
    try:
        name = (directory / _NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        name = directory.name[:12]
    return KnownRun(directory.name, name, (directory / _KEPT).exists(), used_at, read_at)


def _touched_at(directory: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            found[path.name] = path.stat().st_mtime
    return found
