"""Parallel, resumable transfers, and verified copies of remote artifacts in `cache/` of the home.

    cache/artifacts/<kind>/<digest>/   complete and verified when it got its name
          partial/<digest>/            downloaded so far
          uses/<digest>/<stamp>        processes that read it
          locks/<digest>

Promises: an interrupted download resumes, and every byte is verified. A copy stays while a process
of this machine that reads it lives; of the others the least recently used go if a download would
exceed `RLHF_CACHE_BYTES`. Copies are named by content, so all stores share them.
Does not promise: to keep the limit if living processes read more.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
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
    pending = list(transfers)
    shared = iter(pending)  # gives each transfer to one thread, and ends when `pending` is cleared

    def work() -> None:
        try:
            for one in shared:
                one()
        finally:
            pending.clear()  # here, since the next transfer may start before the caller wakes

    with ThreadPoolExecutor(NUM_TRANSFERS, "transfer") as pool, ExitStack() as stack:
        stack.callback(pending.clear)  # Ctrl-C
        for each in as_completed([pool.submit(work) for _ in range(NUM_TRANSFERS)]):
            each.result()


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
            objects.compare(f"{path} from the store", digest.hexdigest(), entry)  # raises


def _write(file: IO[bytes], data: bytes, start: int) -> None:
    file.truncate(start)  # remove the remains of a write that a full disk cut
    file.write(data)
    file.flush()


class ArtifactCache:
    """Keeps verified copies of artifacts for the processes of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take_in(self, source: Path, kind: str, digest: str) -> None:
        """Try to move a published directory with manifest into the cache, to save a download."""
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
            try:
                if final.exists():
                    verify_named(final, digest)
                    os.utime(final)
                    return final
            except ArtifactCorruptError as error:
                _log.warning("loading a damaged copy again: %s", error)
                remove_directory(final)
            files = manifest()
            unfinished = self._directory / "partial" / digest
            self._make_room(sum(entry.size_bytes for entry in files.files.values()), digest)
            make_directories(unfinished)
            download(unfinished, files, read)
            make_directories(final.parent)
            publish_directory(unfinished, final)
            return final

    def _make_room(self, needed_bytes: int, digest: str) -> None:
        limit = env.RLHF_CACHE_BYTES.require()
        if not limit.isdigit():
            name = f"environment.{env.RLHF_CACHE_BYTES.name}"
            raise ConfigError(name, f"got {limit!r}; need bytes")
        copies = chain(self._directory.glob("artifacts/*/*"), self._directory.glob("partial/*"))
        others = [path for path in copies if path.name != digest and path.name[0] != "."]
        others.sort(key=lambda path: path.stat().st_mtime)
        sizes = {path: _size_bytes(path) for path in others}
        total_bytes = needed_bytes + sum(sizes.values())
        for path, size_bytes in sizes.items():
            if total_bytes <= int(limit):
                return
            with self._lock(path.name).open("ab") as file:
                if lock_now(file.fileno()) and not self._is_read(path.name):
                    remove_directory(path)
                    total_bytes -= size_bytes
        if total_bytes > int(limit):
            _log.warning(
                "%s takes %d bytes, more than RLHF_CACHE_BYTES: all of it is in use",
                self._directory,
                total_bytes,
            )

    def _is_read(self, digest: str) -> bool:
        uses = [*(self._directory / "uses" / digest).glob("*")]
        dead = [use for use in uses if is_dead(use.name)]
        for use in dead:
            use.unlink(missing_ok=True)
        return len(dead) < len(uses)

    def _lock(self, digest: str) -> Path:
        return self._directory / "locks" / digest

    def _path(self, kind: str, digest: str) -> Path:
        return self._directory / "artifacts" / kind / digest


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
