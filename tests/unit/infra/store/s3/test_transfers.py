"""Transfers of many files: the first failure is told at once."""

import hashlib
import threading
from pathlib import Path

import pytest

from infra.errors import StoreUnreachableError
from infra.store.artifacts import FileEntry, Manifest
from infra.store.s3 import objects as objects_module
from infra.store.s3.cache import NUM_TRANSFERS, download
from infra.store.s3.storage import S3Storage

NUM_FILES = 100
DIGEST = hashlib.sha256(b"x").hexdigest()
MANY = Manifest(
    kind="model",
    files={f"f{i:03}": FileEntry(size_bytes=1, sha256=DIGEST) for i in range(NUM_FILES)},
)


def test_a_download_that_fails_asks_for_no_more_files(tmp_path: Path) -> None:
    asked: list[str] = []

    def read(name: str, start: int, end: int) -> bytes:
        asked.append(name)
        raise StoreUnreachableError("no answer")

    with pytest.raises(StoreUnreachableError):
        download(tmp_path, MANY, read)
    assert len(asked) <= NUM_TRANSFERS + 1


def test_a_failure_is_told_though_the_file_before_it_still_comes(tmp_path: Path) -> None:
    asked: list[str] = []
    failed = threading.Event()

    def read(name: str, start: int, end: int) -> bytes:
        asked.append(name)
        if name == "f000":
            assert failed.wait(60)
            return b"x"
        failed.set()
        raise StoreUnreachableError("no answer")

    with pytest.raises(StoreUnreachableError):
        download(tmp_path, MANY, read)
    assert len(asked) <= NUM_TRANSFERS + 1


def test_an_upload_that_fails_sends_no_more_files(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def upload(self: object, path: Path, name: str, entry: FileEntry) -> None:
        sent.append(name)
        raise StoreUnreachableError("no answer")

    source = tmp_path / "out"
    source.mkdir()
    for name in MANY.files:
        (source / name).write_bytes(b"x")
    monkeypatch.setattr(objects_module.Objects, "upload", upload)
    with pytest.raises(StoreUnreachableError):
        S3Storage(uri).publish(source, "model")
    assert len(sent) <= NUM_TRANSFERS + 1
