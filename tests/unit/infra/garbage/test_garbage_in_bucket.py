"""What of a store in a bucket may go, and that taking it away harms nobody."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from rlhf.testing.s3_server import BUCKET

from infra import env
from infra.faults import InjectedFaultError
from infra.garbage import DAY_S, Collected, collect
from infra.services.stack import held_stages
from infra.store.heartbeat import Heartbeat
from infra.store.process_stamp import own_stamp
from infra.store.s3 import inventory
from infra.store.s3.objects import Found
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.stage_spec import CommitRecord
from tests.unit.infra.garbage.bucket import DEADLINE_S, Store, fp


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
def test_killed_collection_keeps_the_store_usable_and_resumes(
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
            assert collect(collector, collector.inventory, found).problems == ()
            looked_up = pool.submit(run)
            assert waits.wait(DEADLINE_S)
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
    monkeypatch.setattr("infra.store.s3.inventory._log.warning", lambda *_: waits.set())
    with ThreadPoolExecutor(1) as pool:
        with collector.inventory.exclusively():
            found = store.survey(collector)
            published = pool.submit(store.publish, publisher, "same")
            assert waits.wait(DEADLINE_S)
            # The times of a service are full seconds: what it wrote may look as old as the survey.
            [(digest, stored)] = found.artifacts
            same_second = replace(stored, touched_at=time.time() + DAY_S)
            found = replace(found, artifacts=((digest, same_second),))
            assert collect(collector, collector.inventory, found).problems == ()
            assert not store.objects.listed("artifacts/")
        assert published.result(DEADLINE_S) == artifact
    assert store.open().verify(artifact, "bytes")


def test_local_rest_of_a_removed_log_is_not_in_the_next_one(store: Store) -> None:
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


def test_run_begun_while_being_forgotten_keeps_its_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("old")
    collector, runner = store.open(), store.open()
    runner.runs.begin(fp("a run"), "a run")
    runner.runs.use(fp("a run"), fp("old"))
    store.later(40)
    waits = threading.Event()
    monkeypatch.setattr("infra.store.s3.inventory._log.warning", lambda *_: waits.set())

    def run() -> None:
        runner.runs.begin(fp("a run"), "a run")
        runner.runs.use(fp("a run"), fp("old"))

    with ThreadPoolExecutor(1) as pool:
        with collector.inventory.exclusively():
            found = store.survey(collector)
            begun = pool.submit(run)
            assert waits.wait(DEADLINE_S)
            assert collect(collector, collector.inventory, found).problems == ()
            assert not store.objects.listed("runs/"), "all of it was forgotten"
        begun.result(DEADLINE_S)
    [known] = store.open().runs.known()
    assert (known.key, known.name, {*known.used_at}) == (fp("a run"), "a run", {fp("old")})


def test_who_holds_a_stage_of_a_bucket_is_told(store: Store) -> None:
    storage = store.open()
    storage.attempts.hold(fp("at work"), Holder(id="me", process=own_stamp()), 0)
    with Heartbeat(storage.channel(fp("at work")).local_dir(0) / "heartbeat", 0.1):
        lines = list(held_stages(store.uri))
    assert len(lines) == 1
    assert lines[0].startswith(f"{fp('at work')[:12]} is held by ")
