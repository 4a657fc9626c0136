"""A job that claims the next stage says so first: whoever collects garbage leaves it what it needs.

The stage that is claimed was done long ago, by a run that nobody remembers.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf.testing.s3_server import BUCKET, environment, s3_server

from engines.jobs.process.runtime import _claim
from infra import garbage as survey_module
from infra.garbage import DAY_S, Limits, collect, survey
from infra.identity.fingerprint import next_fingerprint
from infra.store.canonical import sha256_json
from infra.store.process_stamp import own_stamp
from infra.store.s3 import inventory, mirror
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Attempt, Holder
from infra.store.stage_spec import Artifact, CommitRecord, NextStage, StageSpec
from infra.store.storage import LocalStorage, Storage

DEADLINE_S = 60.0
RUN = "a" * 64
TRAINED = "b" * 64


class Job:
    """A job that just published its policy, and may go on with the policy's evaluation."""

    def __init__(self, storage: Storage, directory: Path) -> None:
        self.storage, self._directory = storage, directory
        holder = Holder(id="job", process=own_stamp())
        self.attempt = storage.attempts.hold(TRAINED, holder, 0)
        self.output = self.publish("policy")
        spec = StageSpec(
            stage="evaluate", job_module="m", fingerprint=TRAINED, attempt=0, holder="next",
            config={}, inputs={}, seed=0, store_uri=storage.uri,
        )  # fmt: skip
        self.after = NextStage(spec=spec, identity={"inputs": {}}, follower="me", run_key=RUN)
        self.claimed = next_fingerprint(self.after, self.output)

    def publish(self, kind: str) -> Artifact:
        source = self._directory / uuid.uuid4().hex
        source.mkdir(parents=True)
        (source / "data.txt").write_text(kind)
        return self.storage.publish(source, kind)

    def evaluated_before(self) -> Artifact:
        """The next stage is done already."""
        before: Attempt = self.storage.attempts.hold(
            self.claimed, Holder(id="long ago", process=own_stamp()), 0
        )
        made = self.publish("evaluation")
        record = CommitRecord(
            fingerprint=self.claimed,
            stage="evaluate",
            artifact=made,
            attempt=0,
            committed_at="then",
        )
        self.storage.commit(before, record)
        return made

    def claim(self) -> StageSpec | None:
        return _claim(self.storage, self.after, self.attempt, self.output)


def test_claim_after_the_survey_saves_a_stage_from_removal(tmp_path: Path) -> None:
    job = Job(LocalStorage(tmp_path / "store"), tmp_path / "out")
    artifact = job.evaluated_before()
    for place in (f"stages/{job.claimed}", f"work/{job.claimed}", f"artifacts/{artifact.kind}"):
        set_age(tmp_path / "store" / place, 40)
    storage = LocalStorage(tmp_path / "store")
    found = survey(storage, storage.inventory, {}, Limits())
    assert [stage.fingerprint for stage in found.goes] == [job.claimed]
    assert job.claim() is None, "it is done: nobody computes it again"
    done = collect(storage, storage.inventory, found)
    assert done.spared == (
        f"stages/{job.claimed}",
        f"artifacts/evaluation/{artifact.digest}",
    )
    record = LocalStorage(tmp_path / "store").lookup(job.claimed)
    assert record is not None
    assert storage.local_copy(record.artifact).is_dir()
    [run] = storage.runs.known()
    assert (run.key, {*run.used_at}) == (RUN, {job.claimed})


def set_age(root: Path, days: float) -> None:
    at = time.time() - days * DAY_S
    for path in (root, *root.rglob("*")):
        if path.exists():
            os.utime(path, (at, at))


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(inventory, "POLL_S", 0.05)
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
        mirror.end_below(tmp_path)


@pytest.mark.parametrize("looks_old", [True, False])
def test_bucket_claim_waits_for_gc_and_recomputes_removed_stage(
    looks_old: bool, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, collector = Job(S3Storage(uri), tmp_path / "out"), S3Storage(uri)
    job.evaluated_before()
    collector.runs.use(sha256_json("another run"), TRAINED)
    collector.runs.keep(sha256_json("another run"), True)
    # Things in a bucket are as old as the service says, so the survey looks from a later day.
    at = time.time() + 40 * DAY_S
    monkeypatch.setattr(survey_module.time, "time", lambda: at)
    waits = threading.Event()
    monkeypatch.setattr("infra.store.s3.inventory._log.warning", lambda *_: waits.set())
    with ThreadPoolExecutor(1) as pool:
        with collector.inventory.exclusively():
            found = survey(collector, collector.inventory, {}, Limits())
            assert [stage.fingerprint for stage in found.goes] == [job.claimed]
            claiming = pool.submit(job.claim)
            assert waits.wait(DEADLINE_S), "it went on while what it needs was going"
            # A bucket's times are whole seconds: a claim's mark may look as the one before it.
            if looks_old:
                found = replace(found, runs=tuple(collector.runs.known()))
            assert collect(collector, collector.inventory, found).problems == ()
            assert bool(collector.attempts.entries(job.claimed)) is not looks_old
        claimed = claiming.result(DEADLINE_S)
    if not looks_old:
        assert claimed is None, "it was spared, and is done"
        return
    assert claimed is not None
    assert (claimed.fingerprint, claimed.inputs["policy"].digest) == (
        job.claimed,
        job.output.digest,
    )
    [held] = S3Storage(uri).attempts.entries(job.claimed)
    assert (held.kind, held.holder.id) == ("held", "next")
    assert RUN in {run.key for run in collector.runs.known() if job.claimed in run.used_at}
