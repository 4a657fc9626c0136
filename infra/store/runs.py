"""Pipeline runs and what they use: one directory `runs/<key>/` per run.

    runs/<key>/name                    name for people
    runs/<key>/stages/<fingerprint>    touched whenever the run asks for the stage
    runs/<key>/artifacts/<digest>      artifact of this store that the run reads by its path
    runs/<key>/kept                    a user asked to keep what the run used

Promises: a run records a use before it looks the stage or artifact up, so a collector that removes
it and then reads the records sees the use, or the run sees that it is gone.
Does not promise: that the record of a use survives a power loss.
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
    """A pipeline run that used a store; times are in seconds since the epoch.

    Attributes:
        used_at: by fingerprint, when the run last asked for the stage.
        read_at: by digest, when the run last read an artifact that none of its stages made.
    """

    key: str
    name: str
    kept: bool
    used_at: Mapping[str, float]
    read_at: Mapping[str, float]

    @property
    def spoke_at(self) -> float:
        """Time of the last recorded use or read; seconds since the epoch."""
        return max((*self.used_at.values(), *self.read_at.values()), default=0.0)


class Runs(Protocol):
    """The runs that use a store."""

    def begin(self, key: str, name: str) -> None:
        """Record a run; `key` is a sha256, `name` is for people."""
        ...

    def use(self, key: str, fingerprint: str) -> None:
        """Record that a run uses a stage; called before the stage is looked up."""
        ...

    def read(self, key: str, digest: str) -> None:
        """Record that a run reads an artifact of the store that none of its stages made."""
        ...

    def keep(self, key: str, kept: bool) -> None:
        """Set or clear the mark that keeps everything a run used and read, however old."""
        ...

    def known(self) -> list[KnownRun]:
        """Return all runs, sorted by name and key."""
        ...

    def forget(self, key: str) -> None:
        """Remove the record of a run, which may be absent."""
        ...


class LocalRuns:
    """`Runs` in the directory of a local store."""

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
    used_at, read_at = _touched_at(directory / _STAGES), _touched_at(directory / _ARTIFACTS)
    try:
        name = (directory / _NAME).read_text(encoding="utf-8")
    except FileNotFoundError:  # the run is being forgotten
        name = directory.name[:12]
    return KnownRun(directory.name, name, (directory / _KEPT).exists(), used_at, read_at)


def _touched_at(directory: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            found[path.name] = path.stat().st_mtime
    return found
