"""Who comes between a survey of a bucket and the removal, and what both ask of the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from flows.commands import gc
from flows.commands.cli import main
from infra.errors import NotExclusiveError
from infra.garbage import Limits, Survey, collect
from infra.store.process_stamp import own_stamp
from infra.store.s3 import inventory
from infra.store.s3.storage import S3Storage
from infra.store.stage_log import Holder
from infra.store.storage import open_storage
from tests.unit.infra.garbage.bucket import Store, fp, record_of

MAX_NUM_PER_STAGE = 2


@contextmanager
def requests(store: Store) -> Iterator[list[str]]:
    """Paths of all requests of this process; all stores of a service share its client."""
    events, seen = store.objects._client.meta.events, list[str]()

    def call(params: dict[str, Any], **_: Any) -> None:
        seen.append(params["url_path"])

    events.register_first("before-call.s3", call)
    try:
        yield seen
    finally:
        events.unregister("before-call.s3", call)


def test_a_survey_asks_at_most_twice_for_each_stage_that_is_done(store: Store) -> None:
    nums: list[int] = []
    for batch in (3, 8):
        for number in range(batch):
            store.commit(f"{batch} {number}")
        storage = store.open()
        with requests(store) as seen:
            assert len(store.survey(storage).stays) > 0
        nums.append(len(seen))
    assert nums[1] - nums[0] <= MAX_NUM_PER_STAGE * 8


def test_already_read_entries_are_not_reread_under_the_lock(store: Store) -> None:
    nums: list[int] = []
    for batch in (3, 8):
        for number in range(batch):
            store.commit(f"{batch} {number}")
        storage = store.open()
        found = store.survey(storage)
        with storage.inventory.exclusively(), requests(store) as seen:
            collect(storage, storage.inventory, found)
        nums.append(sum("collecting" not in path for path in seen))
    assert nums[0] == nums[1], "what stays costs nothing"


def test_runs_do_not_wait_while_a_store_is_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("old")
    store.open()
    waited: list[bool] = []
    survey = gc.survey

    def looked(storage: S3Storage, inventory: Any, aliased: Any, limits: Limits) -> Survey:
        found = survey(storage, inventory, aliased, limits)
        others = S3Storage(store.uri)._collecting
        waited.append(others._under_way(others._found()) is not None)
        return found

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(gc, "survey", looked)
    store.later(40)
    assert main(["gc", "--store", store.uri, "--delete"]) == 0
    assert waited == [False]
    assert not store.has("old")


def test_what_is_said_between_the_look_and_the_removal_counts(store: Store) -> None:
    for name in ("used", "read", "went on", "old"):
        store.commit(name)
    collector, runner = store.open(), store.open()
    runner.runs.begin(fp("goes on"), "goes on")
    runner.runs.use(fp("goes on"), fp("went on"))
    store.later(40)
    found = store.survey(collector)
    assert len(found.goes) == 4
    record = runner.lookup(fp("read"))
    assert record is not None
    runner.runs.begin(fp("begins"), "begins")
    runner.runs.use(fp("begins"), fp("used"))
    runner.runs.read(fp("begins"), record.artifact.digest)
    runner.runs.use(fp("goes on"), fp("its next"))
    with collector.inventory.exclusively():
        assert collect(collector, collector.inventory, found).problems == ()
    assert [store.has(name) for name in ("used", "read", "went on", "old")] == [True] * 3 + [False]
    assert {run.name for run in runner.runs.known()} == {"begins", "goes on"}


def test_commit_between_survey_and_removal_is_kept(store: Store) -> None:
    """Of a stage that was given up, and of one with content that would have gone."""
    storage = store.open()
    attempt = storage.attempts.hold(fp("given up"), Holder(id="me", process=own_stamp()), 0)
    artifact = store.commit("old", text="same")
    collector = store.open()
    store.later(40)
    found = store.survey(collector)
    assert {stage.fingerprint for stage in found.goes} == {fp("given up"), fp("old")}
    storage.runs.use(fp("a run"), fp("given up"))
    assert store.publish(storage, "same").digest == artifact.digest
    storage.commit(attempt, record_of("given up", artifact))
    with collector.inventory.exclusively():
        assert collect(collector, collector.inventory, found).problems == ()
    assert store.has("given up")
    assert not store.has("old")


def test_a_run_says_what_it_reads(store: Store) -> None:
    runs = store.open().runs
    runs.begin(fp("a run"), "a run")
    assert runs.known() == []
    runs.read(fp("a run"), "0f" * 32)
    [run] = open_storage(store.uri).runs.known()
    assert (run.name, {*run.read_at}, run.used_at) == ("a run", {"0f" * 32}, {})
    assert run.spoke_at == run.read_at["0f" * 32]


def test_interrupted_collection_frees_space_and_next_continues(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        store.commit(f"stage {number}")
    store.later(40)
    storage = store.open()
    found = store.survey(storage)
    check, checks = storage._collecting.check, count()

    def end_after_a_while() -> None:
        monkeypatch.setattr(inventory, "MAX_HOLD_S", 1500.0 if next(checks) < 14 else -1.0)
        check()

    storage.inventory._collecting.check = end_after_a_while
    with (
        storage.inventory.exclusively(),
        pytest.raises(NotExclusiveError, match="run again for what is left"),
    ):
        collect(storage, storage.inventory, found)
    monkeypatch.setattr(inventory, "MAX_HOLD_S", 1500.0)
    done = [not store.has(f"stage {number}") for number in range(4)]
    assert 0 < sum(done) < 4
    num_artifacts = len(store.open().inventory.artifacts())
    assert num_artifacts <= 4 - sum(done) + 1
    assert store.collect().problems == ()
    assert store.names() == set()
