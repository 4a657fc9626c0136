"""A store in a bucket, as the tests of its garbage see it.

Things in a bucket are as old as the service says, so here the survey looks from a later day.
"""

import time
import uuid
from pathlib import Path

import pytest
from rlhf.testing.s3_server import BUCKET

from infra import garbage as survey_module
from infra.garbage import DAY_S, Collected, Limits, Survey, collect, survey
from infra.store.canonical import sha256_json
from infra.store.process_stamp import own_stamp
from infra.store.s3.objects import Objects, S3Address
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord

DEADLINE_S = 60.0


class Store:
    """A store in a bucket, as several machines see it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        self.uri = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        self.objects = Objects(S3Address.parse(self.uri))

    def open(self) -> S3Storage:
        """As a machine that has no copies of anything."""
        self._monkeypatch.setenv("RLHF_HOME", str(self.root / uuid.uuid4().hex))
        return S3Storage(self.uri)

    def later(self, days: float) -> None:
        """The day on which the next survey looks."""
        at = time.time() + days * DAY_S
        self._monkeypatch.setattr(survey_module.time, "time", lambda: at)

    def publish(self, storage: S3Storage, text: str) -> Artifact:
        source = self.root / uuid.uuid4().hex
        (source / "sub").mkdir(parents=True)
        (source / "sub/data.txt").write_text(text)
        (source / "more.txt").write_text(text * 2)
        return storage.publish(source, "model")

    def commit(self, name: str, text: str = "") -> Artifact:
        """A stage that is done, with a journal and steps that nobody came to remove."""
        storage = self.open()
        attempt = storage.attempts.hold(fp(name), Holder(id=name, process=own_stamp()), 0)
        directory = storage.channel(fp(name)).local_dir(0)
        (directory / "journal.jsonl").write_text('{"a": 1}\n')
        artifact = self.publish(storage, text or name)
        storage.commit(attempt, record_of(name, artifact))
        return artifact

    def collect(self, storage: S3Storage | None = None) -> Collected:
        storage = storage or self.open()
        found = self.survey(storage)
        with storage.inventory.exclusively():
            return collect(storage, storage.inventory, found)

    def survey(self, storage: S3Storage) -> Survey:
        return survey(storage, storage.inventory, {}, Limits())

    def has(self, name: str) -> bool:
        """Whether a stage is done; all of its bytes are there then."""
        storage = self.open()
        record = storage.lookup(fp(name))
        return record is not None and storage.local_copy(record.artifact).is_dir()

    def names(self) -> set[str]:
        """Of all objects but the collectors' own."""
        return {
            each.name
            for each in self.objects.listed("")
            if each.name != "name" and not each.name.startswith("collecting/")
        }


def fp(name: str) -> str:
    return sha256_json(name)


def record_of(name: str, artifact: Artifact) -> CommitRecord:
    return CommitRecord(
        fingerprint=fp(name), stage="sft", artifact=artifact, attempt=0, committed_at="now"
    )
