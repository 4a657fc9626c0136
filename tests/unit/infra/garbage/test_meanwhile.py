"""What somebody says while garbage is collected, by a clock that is behind."""

import os
from pathlib import Path

from infra.garbage import DAY_S, Limits, Survey, collect, survey
from infra.store.canonical import sha256_json
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import LocalStorage

NAME, STAGE = "a run", sha256_json("stage")
RUN = sha256_json(NAME)
BEHIND_S = 5.0
"""That a file server's clock is behind that of the machine which collects."""


def old_stage(storage: LocalStorage, root: Path) -> Artifact:
    """A stage that a run used 40 days ago, and nobody since."""
    source = root / "out"
    source.mkdir()
    (source / "data.txt").write_text("data")
    attempt = storage.attempts.hold(STAGE, Holder(id="me", process="test"), 0)
    artifact = storage.publish(source, "model")
    record = CommitRecord(
        fingerprint=STAGE, stage="sft", artifact=artifact, attempt=0, committed_at="then"
    )
    storage.commit(attempt, record)
    storage.runs.begin(RUN, NAME)
    storage.runs.use(RUN, STAGE)
    for path in Path(storage.uri).rglob("*"):
        at = path.stat().st_mtime - 40 * DAY_S
        os.utime(path, (at, at))
    return artifact


def surveyed(storage: LocalStorage) -> Survey:
    return survey(storage, storage.inventory, {}, Limits())


def test_a_use_is_seen_although_the_clock_of_the_store_is_behind(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    old_stage(storage, tmp_path)
    found = surveyed(storage)
    storage.runs.use(RUN, STAGE)
    os.utime(tmp_path / "store/runs" / RUN / "stages" / STAGE, (found.at, found.at - BEHIND_S))
    collect(storage, storage.inventory, found)
    record = LocalStorage(tmp_path / "store").lookup(STAGE)
    assert record is not None, "what a run asked for after the survey went"


def test_equal_content_is_kept_although_store_clock_is_behind(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    artifact = old_stage(storage, tmp_path)
    found = surveyed(storage)
    source = tmp_path / "out"
    source.mkdir()
    (source / "data.txt").write_text("data")
    assert storage.publish(source, "model").digest == artifact.digest
    os.utime(artifact.uri, (found.at, found.at - BEHIND_S))
    collect(storage, storage.inventory, found)
    assert Path(artifact.uri).is_dir(), "what a publisher found there, and will commit, went"
