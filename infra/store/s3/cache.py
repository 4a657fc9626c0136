"""Parallel, resumable transfers, and verified copies of remote artifacts in `cache/` of the home.

    cache/artifacts/<kind>/<digest>/   complete and verified when it got its name
          partial/<digest>/            downloaded so far
          uses/<digest>/<stamp>        processes that read it
          locks/<digest>

Promises: an interrupted download resumes, and every byte is verified. A copy stays while a process
of this machine that reads it lives; of the others the least recently used go if a download would
exceed `RLHF_CACHE_BYTES`. Copies are named by content, so all stores share them.
Does not promise: the limit, if living processes read more than it.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

from infra import env
from infra.errors import ArtifactCorruptError, ConfigError
from infra.host.records import file_lock, lock_now
from infra.store.artifacts import FileEntry, Manifest, write_manifest
from infra.store.atomic import make_directories, publish_directory, remove_directory
from infra.store.process_stamp import is_dead, own_stamp
from infra.store.s3 import objects
from infra.store.storage import verify_named
from infra.waiting import when_there_is_room

NUM_TRANSFERS = 4
LOCK_DEADLINE_S = 3600.0
"""Time limit for another process of this machine that downloads the same artifact."""
_log = logging.getLogger(__name__)

Read = Callable[[str, int, int], bytes]
"""Returns all bytes of a file from one position to another."""


def transfer(transfers: Iterable[Callable[[], None]]) -> None:
    """Call transfers in order, `NUM_TRANSFERS` at a time.

    The first exception is raised when those in progress have ended; no others are started.
    """
    is_over = threading.Event()

    def make(one: Callable[[], None]) -> None:
        try:
            if not is_over.is_set():
                one()
        except BaseException:
            is_over.set()  # here, since the next transfer may start before the caller wakes
            raise

    with ThreadPoolExecutor(NUM_TRANSFERS, "transfer") as pool:
        try:
            for each in as_completed([pool.submit(make, one) for one in transfers]):
                each.result()
        finally:
            is_over.set()


def download(directory: Path, manifest: Manifest, read: Read) -> None:
    """Fill a directory, which may hold a partial download, and write the manifest last.

    Every byte is verified, also those of an earlier call. After an error no other file is begun.
    `ArtifactCorruptError` means that the bytes do not match the manifest.
    """
    transfer(partial(_load, directory, *each, read) for each in manifest.files.items())
    write_manifest(directory, manifest)


def _load(directory: Path, name: str, entry: FileEntry, read: Read) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a+b") as file:
            if file.tell() > entry.size_bytes:
                file.truncate(0)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
            resumed = at = file.tell()
            while at < entry.size_bytes:
                data = read(name, at, min(at + objects.PART_BYTES, entry.size_bytes))
                when_there_is_room(partial(_write, file, data, at), str(path))
                digest.update(data)
                at += len(data)
        if digest.hexdigest() == entry.sha256:
            return
        path.unlink()
        if not resumed:
            raise ArtifactCorruptError(
                f"{name}: sha256 {digest.hexdigest()} != {entry.sha256} of the manifest"
            )


def _write(file: IO[bytes], data: bytes, start: int) -> None:
    file.truncate(start)  # remove the remains of a write that a full disk cut
    file.write(data)
    file.flush()


class ArtifactCache:
    """The copies of one machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take_in(self, source: Path, kind: str, digest: str) -> None:
        """Move a published directory with its manifest into the cache, to save a download."""
        final = self._path(kind, digest)
        with file_lock(self._lock(digest), LOCK_DEADLINE_S), suppress(OSError):
            self._make_room(_size_bytes(source), digest)
            make_directories(final.parent)
            publish_directory(source, final)

    def fetch(self, kind: str, digest: str, manifest: Callable[[], Manifest], read: Read) -> Path:
        """Return a verified copy, which stays while this process lives; `read` as for `download`.

        Raises:
            ArtifactCorruptError: the store's bytes do not match the manifest.
            DeadlineError: another process downloads it and does not finish.
        """
        final = self._path(kind, digest)
        with file_lock(self._lock(digest), LOCK_DEADLINE_S):
            use = self._directory / "uses" / digest / own_stamp()
            use.parent.mkdir(parents=True, exist_ok=True)
            use.touch()
            if final.exists() and _is_sound(final, digest):
                os.utime(final)
                return final
            files = manifest()
            unfinished = self._directory / "partial" / digest
            self._make_room(sum(entry.size_bytes for entry in files.files.values()), digest)
            make_directories(unfinished)
            download(unfinished, files, read)
            make_directories(final.parent)
            publish_directory(unfinished, final)
            return final

    def _make_room(self, needed_bytes: int, digest: str) -> None:
        limit_bytes = _limit_bytes()
        copies = chain(self._directory.glob("artifacts/*/*"), self._directory.glob("partial/*"))
        others = [path for path in copies if path.name != digest and path.name[0] != "."]
        sizes = {path: _size_bytes(path) for path in sorted(others, key=_changed_at)}
        total_bytes = needed_bytes + sum(sizes.values())
        for path, size_bytes in sizes.items():
            if total_bytes <= limit_bytes:
                return
            with self._lock(path.name).open("ab") as file:
                if lock_now(file.fileno()) and not self._is_read(path.name):
                    remove_directory(path)
                    total_bytes -= size_bytes
        if total_bytes > limit_bytes:
            _log.warning(
                "%s takes %d bytes, more than RLHF_CACHE_BYTES: all of it is in use",
                self._directory,
                total_bytes,
            )

    def _is_read(self, digest: str) -> bool:
        uses = {use: is_dead(use.name) for use in (self._directory / "uses" / digest).glob("*")}
        for use, dead in uses.items():
            if dead:
                use.unlink(missing_ok=True)
        return not all(uses.values())

    def _lock(self, digest: str) -> Path:
        return self._directory / "locks" / digest

    def _path(self, kind: str, digest: str) -> Path:
        return self._directory / "artifacts" / kind / digest


def _limit_bytes() -> int:
    value = env.RLHF_CACHE_BYTES.require()
    if not value.isdigit():
        raise ConfigError(f"environment.{env.RLHF_CACHE_BYTES.name}", f"got {value!r}; need bytes")
    return int(value)


def _is_sound(directory: Path, digest: str) -> bool:
    """Return True if a copy is intact; remove a damaged one, since the store has the original."""
    try:
        verify_named(directory, digest)
    except ArtifactCorruptError as error:
        _log.warning("loading a damaged copy again: %s", error)
        remove_directory(directory)
        return False
    return True


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime
