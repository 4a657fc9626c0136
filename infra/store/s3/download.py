"""The files of a manifest, brought here in parts.

Promises: goes on where an earlier call was cut; every byte was compared with the manifest when it
returns, what an earlier call left too; once a file fails, no other is begun.
"""

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
"""A file's bytes from one place to before another, all of them."""


def download(directory: Path, manifest: Manifest, read: Read) -> None:
    """Fill a directory with the files of a manifest, and write that last.

    Args:
        directory: exists; may hold what an earlier call had brought.
        manifest: of the files.
        read: gives a stretch of one.

    Raises:
        ArtifactCorruptError: what is read is not what the manifest says.
    """
    transfer(partial(_load, directory, *each, read) for each in manifest.files.items())
    write_manifest(directory, manifest)


def _load(directory: Path, name: str, entry: FileEntry, read: Read) -> None:
    """Bring one file to its whole size; what is there of it already is not asked for again."""
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
    file.truncate(start)  # what a full disk left of an earlier try
    file.write(data)
    file.flush()
