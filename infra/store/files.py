"""Small files of a store by name, in a directory or in a bucket (`infra.store.s3.objects`).

Promises: a file appears completely or not at all, and of several creators of one name exactly one
succeeds. Listings skip temporary files; a file that cannot be read raises `OSError` and does not
count as absent.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from infra.store.atomic import atomic_write_bytes, create_exclusively, make_directories


class Found(NamedTuple):
    """A file in a listing; `changed_at` is the store's time in seconds since the epoch."""

    name: str
    size_bytes: int
    changed_at: float


class Files(ABC):
    """Files by name; slashes separate directories, which exist while they have files."""

    @abstractmethod
    def place(self, name: str) -> str:
        """Return the path or URI of a file, for messages."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is absent."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file."""

    def touch(self, name: str) -> None:
        """Create an empty file or renew its time; it may not survive a power loss."""
        self.put(name, b"")

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a file unless the name is taken; return False if it is."""

    @abstractmethod
    def listed(self, prefix: str) -> list[Found]:
        """Return all files below a directory, sorted by name; `prefix` ends with a slash."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove files, which may be absent."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Remove a directory, which may be absent, with all its files."""


def read_stretch(path: Path, start: int = 0, end: int | None = None) -> bytes:
    """Return bytes `start` to `end` (None: the last) of a file; empty if the file is absent."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        return file.read(-1 if end is None else max(0, end - start))
    return b""


class LocalFiles(Files):
    """Files in a directory; see `Files` for the methods."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def place(self, name: str) -> str:
        """Return the absolute path."""
        return str(self._root / name)

    def get(self, name: str) -> bytes | None:
        """Read the file."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Replace the file by a rename."""
        atomic_write_bytes(self._made(name), data)

    def touch(self, name: str) -> None:
        """Set the time of the file to now."""
        self._made(name).touch()

    def create(self, name: str, data: bytes) -> bool:
        """Create the file by `link`, which fails if the name exists."""
        return create_exclusively(self._made(name), data)

    def listed(self, prefix: str) -> list[Found]:
        """Walk the directory."""
        found: list[Found] = []
        for parent, directories, names in os.walk(
            self._root / prefix, onerror=_raise_if_there, followlinks=True
        ):
            directories[:] = [name for name in directories if not name.startswith(".")]
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                with suppress(FileNotFoundError):  # removed after the listing
                    state = path.stat()
                    name = str(path.relative_to(self._root))
                    found.append(Found(name, state.st_size, state.st_mtime))
        return sorted(found)

    def delete(self, names: Sequence[str]) -> None:
        """Unlink the files."""
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def remove(self, directory: str) -> None:
        """Remove the tree; errors are ignored."""
        shutil.rmtree(self._root / directory, ignore_errors=True)

    def _made(self, name: str) -> Path:
        """Return the path of a file, after creating its directory if absent."""
        path = self._root / name
        make_directories(path.parent)
        return path


def _raise_if_there(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
