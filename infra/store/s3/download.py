"""Resumable download of the files of a manifest."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from infra.errors import ArtifactCorruptError
from infra.store.artifacts import FileEntry, Manifest, write_manifest
from infra.store.s3 import objects
from infra.store.s3.transfers import transfer
from infra.waiting import when_there_is_room

Read = Callable[[str, int, int], bytes]
"""Returns all bytes of a file from one position to another."""


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
            found = digest.hexdigest()
            raise ArtifactCorruptError(f"{name}: sha256 {found} != {entry.sha256} of the manifest")


def _write(file: IO[bytes], data: bytes, start: int) -> None:
    file.truncate(start)  # remove the remains of a write that a full disk cut
    file.write(data)
    file.flush()
