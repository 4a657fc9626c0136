"""What of a store in a bucket may go, and that taking it away harms nobody.

Things in a bucket are as old as the service says, so here the survey looks from a later day.
"""

import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.s3_server import BUCKET, environment, s3_server

from infra import env
from infra.errors import NotExclusiveError, StoreError
from infra.faults import InjectedFaultError
from infra.garbage import survey as survey_module
from infra.garbage.collection import Collected, collect
from infra.garbage.survey import DAY_S, Limits, Survey, survey
from infra.services.held_stages import held_stages
from infra.store.canonical import sha256_json
from infra.store.heartbeat import Heartbeat
from infra.store.process_stamp import own_stamp
from infra.store.s3 import collecting, inventory, mirror
from infra.store.s3.address import S3Address
from infra.store.s3.objects import Found, Objects
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
        with storage.inventory.exclusively():
            found = self.survey(storage)
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


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(collecting, "POLL_S", 0.05)
    yield Store(tmp_path, monkeypatch)
    mirror.end_below(tmp_path)


def test_what_nothing_used_for_long_goes_to_the_last_object(store: Store) -> None:
    store.commit("old")
    before = len(store.names())
    assert before > 5
    store.later(29)
    assert store.survey(store.open()).freed_bytes == 0
    store.later(31)
    storage = store.open()
    found = store.survey(storage)
    done = store.collect(storage)
    assert done == Collected(found.freed_bytes, (), ())
    assert found.freed_bytes == found.total_bytes > 0
    assert store.names() == set()


def test_what_a_run_keeps_stays_whole(store: Store) -> None:
    shared = store.commit("kept", text="same")
    store.commit("old", text="same")
    storage = store.open()
    storage.runs.begin(fp("a run"), "a run")
    storage.runs.use(fp("a run"), fp("kept"))
    storage.runs.keep(fp("a run"), True)
    store.later(400)
    done = store.collect()
    assert (done.spared, done.problems) == ((), ())
    assert store.has("kept")
    assert not store.has("old")
    assert store.open().verify(shared, "bytes")


def test_steps_of_a_done_stage_and_abandoned_uploads_go_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("done")
    steps = f"work/{fp('done')}/steps-0/00000001-{'a' * 64}"
    store.objects.put(f"{steps}/weights", b"w" * 1000)
    store.objects.put(f"with-steps/{fp('done')}", b"")
    at = {"Bucket": BUCKET, "Key": store.objects.address.key("artifacts/model/x/large")}
    upload = store.objects._client.create_multipart_upload(**at)["UploadId"]
    store.objects._client.upload_part(**at, UploadId=upload, PartNumber=1, Body=b"p" * 500)
    storage = store.open()
    with monkeypatch.context() as patched:
        # The service of the tests says that every upload began in 2010.
        patched.setattr(inventory, "ABANDONED_S", 100 * 365 * DAY_S)
        assert [each.size_bytes for each in store.survey(storage).rests] == [1000]
    assert [each.size_bytes for each in store.survey(storage).rests] == [500, 1000]
    assert store.collect(storage).freed_bytes == 1500
    assert not store.objects.listed("with-steps/")
    assert not store.objects.listed(f"{steps}/")
    assert store.objects.unfinished(before=time.time()) == []
    assert store.has("done")


@pytest.mark.parametrize("at_pass", [1, 2, 3, 4])
def test_killed_at_any_point_the_store_works_and_the_rest_goes_later(
    store: Store, monkeypatch: pytest.MonkeyPatch, at_pass: int
) -> None:
    names = ["one", "two"]
    for name in names:
        store.commit(name)
    store.later(40)
    kills = 0
    while True:
        # Each setting of this process counts its own passes.
        monkeypatch.setenv("RLHF_FAULTS", f"garbage.taken=raise:{1000 + kills}@{at_pass}")
        try:
            store.collect()
        except InjectedFaultError:
            kills += 1
        else:
            break
        for name in names:
            store.has(name)  # raises if half of it is there
    assert kills
    assert store.names() == set()


def test_a_run_waits_for_the_end_and_then_sees_what_is_left(store: Store) -> None:
    store.commit("wanted")
    collector, runner = store.open(), store.open()
    store.later(40)
    waits, ended = threading.Event(), threading.Event()
    under_way = runner._collecting._under_way

    def told(found: Mapping[int, Found]) -> str | None:
        at = under_way(found)
        if at is not None:
            waits.set()
        return at

    runner._collecting._under_way = told

    def run() -> CommitRecord | None:
        runner.runs.use(fp("a run"), fp("wanted"))
        assert ended.is_set(), "it went on while what it needs was going"
        return runner.lookup(fp("wanted"))

    with ThreadPoolExecutor(1) as pool:
        with collector.inventory.exclusively():
            found = store.survey(collector)
            looked_up = pool.submit(run)
            assert waits.wait(DEADLINE_S)
            assert collect(collector, collector.inventory, found).problems == ()
            ended.set()
        assert looked_up.result(DEADLINE_S) is None, "computed again"
    assert [run.used_at.keys() for run in store.open().runs.known()] == [{fp("wanted")}]


def test_a_publisher_waits_for_the_end_and_sends_what_went(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = store.commit("old", text="same")
    collector, publisher = store.open(), store.open()
    store.later(40)
    waits = threading.Event()
    monkeypatch.setattr("infra.store.s3.collecting._log.warning", lambda *_: waits.set())
    with ThreadPoolExecutor(1) as pool:
        with collector.inventory.exclusively():
            found = store.survey(collector)
            published = pool.submit(store.publish, publisher, "same")
            assert waits.wait(DEADLINE_S)
            # Its manifest is older than the survey's day, as that of a slow collector's would be.
            assert collect(collector, collector.inventory, found).problems == ()
            assert not store.objects.listed("artifacts/")
        assert published.result(DEADLINE_S) == artifact
    assert store.open().verify(artifact, "bytes")


def test_what_a_machine_kept_of_a_log_that_went_is_no_part_of_the_next(store: Store) -> None:
    store.commit("again")
    home = env.home()
    steps = S3Storage(store.uri).channel(fp("again")).steps_dir(0)
    (steps / "step-00000001").mkdir(parents=True)
    store.later(40)
    store.collect()
    env.set_for_process(env.RLHF_HOME.name, str(home))
    storage = S3Storage(store.uri)
    storage.attempts.hold(fp("again"), Holder(id="anew", process=own_stamp()), 0)
    directory = storage.channel(fp("again")).local_dir(0)
    assert not (directory / "journal.jsonl").exists()
    assert not steps.exists()
    assert storage.channel(fp("again")).read_journal(0) == b""


def test_steps_that_somebody_makes_meanwhile_stay(store: Store) -> None:
    store.commit("done")
    collector, runner = store.open(), store.open()
    place = f"work/{fp('done')}/steps-2"
    runner.runs.use(fp("a run"), fp("done"))
    store.objects.put(f"{place}/00000001-{'a' * 64}/weights", b"w")
    with collector.inventory.exclusively():
        found = store.survey(collector)
        assert [each.place for each in found.rests] == [place]
        runner.attempts.hold(fp("done"), Holder(id="forced", process=own_stamp()), 2, "token")
        assert collect(collector, collector.inventory, found).spared == (place,)
    assert store.objects.listed(place)


def test_an_upload_that_ends_meanwhile_is_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = {"Bucket": BUCKET, "Key": store.objects.address.key("large")}
    client = store.objects._client
    upload = client.create_multipart_upload(**at)["UploadId"]
    paginator = client.get_paginator

    def ended_before(operation: str) -> Any:
        if operation == "list_parts":
            client.abort_multipart_upload(**at, UploadId=upload)
        return paginator(operation)

    with monkeypatch.context() as patched:
        patched.setattr(client, "get_paginator", ended_before)
        assert store.objects.unfinished(before=time.time()) == []


def test_of_two_collectors_one_is_refused(store: Store) -> None:
    store.commit("old")
    store.later(40)
    first, second = store.open(), store.open()
    with first.inventory.exclusively():
        with pytest.raises(StoreError, match="another one collects"):
            store.collect(second)
        with pytest.raises(NotExclusiveError, match="nobody collects"):
            second.runs.forget(fp("a run"))
        first.inventory.take("stages/none", lambda _: False)
    assert store.collect(second).problems == ()
    with pytest.raises(NotExclusiveError, match="nobody collects"):
        first.inventory.take("stages/none", lambda _: False)


def test_a_collector_that_was_taken_for_dead_removes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("old")
    store.later(40)
    first = store.open()
    with first.inventory.exclusively():
        found = store.survey(first)
        with monkeypatch.context() as patched:
            patched.setattr(collecting, "STALE_S", -1.0)
            assert not store.open()._collecting.wait_until_over(), "nobody waits for the dead"
            with store.open().inventory.exclusively():
                before = store.names()
                with pytest.raises(NotExclusiveError, match="others may be at work"):
                    collect(first, first.inventory, found)
                assert store.names() == before
    assert store.has("old")


def test_a_collector_without_a_beat_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = store.open()
    with storage.inventory.exclusively():
        with monkeypatch.context() as patched:
            patched.setattr(collecting, "MAX_SILENCE_S", -1.0)
            with pytest.raises(NotExclusiveError, match="no sign of life"):
                storage.inventory.take("stages/none", lambda _: False)
        with monkeypatch.context() as patched:
            patched.setattr(collecting, "MAX_HOLD_S", -1.0)
            with pytest.raises(NotExclusiveError, match="others wait"):
                storage.inventory.take("stages/none", lambda _: False)
        assert storage.inventory.take("stages/none", lambda _: False)


def test_a_killed_collector_of_this_machine_keeps_nobody(store: Store) -> None:
    gone = "deadbeef.1.1"
    here = own_stamp().split(".")[0]
    store.objects.put("collecting/0", f"{here}.999999.1 x".encode())
    assert not store.open()._collecting.wait_until_over()
    store.objects.put("collecting/1", f"{gone} x".encode())
    with pytest.raises(StoreError, match="another one collects"):
        store.collect()


def test_who_holds_a_stage_of_a_bucket_is_told(store: Store) -> None:
    storage = store.open()
    storage.attempts.hold(fp("at work"), Holder(id="me", process=own_stamp()), 0)
    with Heartbeat(storage.channel(fp("at work")).local_dir(0) / "heartbeat", 0.1):
        lines = list(held_stages(store.uri))
    assert len(lines) == 1
    assert lines[0].startswith(f"{fp('at work')[:12]} is held by ")
