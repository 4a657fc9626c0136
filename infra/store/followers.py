"""The processes that wait for a stage: one file `work/<fingerprint>/followers/<name>` each.

Promises: a job is not stopped while another follower waits for it. A dead follower does not count:
on this machine its process is gone; on another one its file was not touched for `STALE_S`, by the
clock of the shared file system. Until that is noticed, the job merely runs on.
"""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from infra.store.heartbeat import FixedFile, read_fixed
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.stage_spec import check_fingerprint

STALE_S = 120.0


class Followers(Protocol):
    """The followers of all stages of a store; a part of `Attempts`."""

    def join(self, fingerprint: str, follower: str) -> None:
        """See `Attempts.join`."""
        ...

    def leave(self, fingerprint: str, follower: str) -> int:
        """See `Attempts.leave`."""
        ...

    def followed_by(self, follower: str) -> list[str]:
        """See `Attempts.followed_by`."""
        ...


class LocalFollowers:
    """`Followers` in a directory with one subdirectory per fingerprint."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._joined: dict[Path, FixedFile] = {}

    def join(self, fingerprint: str, follower: str) -> None:
        """See `Attempts.join`. The file keeps its size, so a full disk cannot make this fail."""
        path = self._directory(fingerprint) / check_fingerprint(follower)
        if path not in self._joined or not path.exists():
            self._joined[path] = FixedFile(path)
        self._joined[path].write(own_stamp().encode())

    def leave(self, fingerprint: str, follower: str) -> int:
        """See `Attempts.leave`."""
        path = self._directory(fingerprint) / check_fingerprint(follower)
        file = self._joined.pop(path, None)
        if file is not None:
            file.close()
        touched = _touched(path.parent)
        path.unlink(missing_ok=True)
        now = max(touched.values(), default=0.0)
        return sum(_waits(other, now - at) for other, at in touched.items() if other != path)

    def followed_by(self, follower: str) -> list[str]:
        """See `Attempts.followed_by`."""
        pattern = f"*/followers/{check_fingerprint(follower)}"
        return sorted(path.parent.parent.name for path in self._work.glob(pattern))

    def _directory(self, fingerprint: str) -> Path:
        return self._work / check_fingerprint(fingerprint) / "followers"


def _touched(directory: Path) -> dict[Path, float]:
    found: dict[Path, float] = {}
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            with suppress(FileNotFoundError):
                found[path] = path.stat().st_mtime
    return found


def _waits(path: Path, silence_s: float) -> bool:
    if silence_s > STALE_S or is_dead((read_fixed(path) or b"").decode()):
        path.unlink(missing_ok=True)
        return False
    return path.exists()
