"""Of several collectors in a bucket one holds the store, and who holds it no more stops."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from infra.errors import NotExclusiveError, StoreError
from infra.garbage import Collected, collect
from infra.store.process_stamp import own_stamp
from infra.store.s3 import inventory
from infra.store.s3.storage import S3Storage
from infra.waiting import wait_for
from tests.unit.infra.garbage.bucket import DEADLINE_S, Store, fp


def test_of_two_collectors_one_is_refused(store: Store) -> None:
    store.commit("old")
    store.later(40)
    first, second = store.open(), store.open()
    with first.inventory.exclusively():
        with pytest.raises(StoreError, match="another garbage collection"):
            store.collect(second)
        with pytest.raises(NotExclusiveError, match="no collector runs"):
            second.runs.forget(fp("a run"))
        first.inventory.remove_unless("stages/none", lambda _: False)
    assert store.collect(second).problems == ()
    with pytest.raises(NotExclusiveError, match="no collector runs"):
        first.inventory.remove_unless("stages/none", lambda _: False)


def test_a_collector_that_was_taken_for_dead_removes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit("old")
    store.later(40)
    first = store.open()
    with first.inventory.exclusively():
        found = store.survey(first)
        with monkeypatch.context() as patched:
            patched.setattr(inventory, "STALE_S", -1.0)
            assert not store.open()._collecting.wait_until_over(), "nobody waits for the dead"
            with store.open().inventory.exclusively():
                before = store.names()
                with pytest.raises(NotExclusiveError, match="others may be at work"):
                    collect(first, first.inventory, found)
                assert store.names() == before
    assert store.has("old")


@contextmanager
def before_put(store: Store, does: Callable[[str, bool], None]) -> Iterator[None]:
    """Do something before each PutObject of this process, in the thread that sends it.

    Args:
        store: whose client is watched; all stores of a service share it.
        does: given the path, and whether the object may not be there yet.

    Returns:
        The time that it lasts.
    """

    def call(params: Mapping[str, Any], **_: Any) -> None:
        does(params["url_path"], "If-None-Match" in params["headers"])

    events, name = store.objects._client.meta.events, "before-call.s3.PutObject"
    events.register_first(name, call)
    try:
        yield
    finally:
        events.unregister(name, call)


def test_only_one_of_two_concurrent_collectors_holds_the_store(store: Store) -> None:
    store.commit("old")
    store.commit("dear")
    storage = store.open()
    storage.runs.use(fp("a run"), fp("dear"))
    storage.runs.keep(fp("a run"), True)
    store.later(40)
    # Both have found nobody before either says that it collects.
    both_looked, both_know = threading.Barrier(2), threading.Barrier(2)

    def wait_for_the_other(path: str, exclusive: bool) -> None:
        if exclusive and path.endswith("/collecting/0"):
            both_looked.wait(DEADLINE_S)

    def collected(storage: S3Storage) -> Collected | str:
        with ExitStack() as stack:
            try:
                stack.enter_context(storage.inventory.exclusively())
            except StoreError as error:
                return str(error)
            finally:
                both_know.wait(DEADLINE_S)
            return collect(storage, storage.inventory, store.survey(storage))

    with before_put(store, wait_for_the_other), ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(collected, [store.open(), store.open()], timeout=DEADLINE_S))
    [refused] = [each for each in ended if isinstance(each, str)]
    [done] = [each for each in ended if isinstance(each, Collected)]
    at = store.objects.place("collecting/0")
    assert refused == f"{at}: another garbage collection is under way; run again when it is done"
    assert (done.spared, done.problems) == ((), ())
    assert store.has("dear")
    assert not store.has("old")
    assert store.collect() == Collected(0, (), ()), "it is free again, and nothing is left to do"


def test_collector_resumed_between_requests_removes_nothing_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beat is back as well, so that it looks alive: only its number tells that it is not."""
    store.commit("old")
    store.later(40)
    monkeypatch.setattr(inventory, "BEAT_EVERY_S", 0.02)
    first, second = store.open(), store.open()
    other, questions = ExitStack(), list[str]()

    def taken_for_dead(path: str, exclusive: bool) -> None:
        if exclusive or not path.endswith("/collecting/clock"):
            return
        questions.append(path)
        if len(questions) == 2:  # behind the question whether it is needed, before its removal
            with monkeypatch.context() as patched:
                patched.setattr(inventory, "STALE_S", -1.0)
                other.enter_context(second.inventory.exclusively())
            wait_for(lambda: {*first._collecting._found()} == {0, 1}, "its beat", DEADLINE_S)

    with other, first.inventory.exclusively():
        found, before = store.survey(first), store.names()
        with (
            before_put(store, taken_for_dead),
            pytest.raises(NotExclusiveError, match="others may be at work"),
        ):
            collect(first, first.inventory, found)
        assert len(questions) > 2
        assert store.names() == before
        second.inventory.remove_unless("stages/none", lambda _: False)
    assert store.has("old")


def test_collector_paused_before_its_claim_removes_nothing(store: Store) -> None:
    """Two others came meanwhile; the second removed what the first wrote, and the name is free."""
    store.commit("old")
    store.later(40)
    slow, quick = store.open(), store.open()
    other, numbers = ExitStack(), list[str]()

    def sleep(path: str, exclusive: bool) -> None:
        if not exclusive or "/collecting/" not in path:
            return
        numbers.append(path.rpartition("/")[2])
        if len(numbers) == 1:
            with quick.inventory.exclusively():
                pass
            other.enter_context(quick.inventory.exclusively())

    with other, before_put(store, sleep):
        before = store.names()
        with pytest.raises(NotExclusiveError, match="others may be at work"):
            store.collect(slow)
        assert numbers == ["0", "0", "1"]
        assert store.names() == before
        quick.inventory.remove_unless("stages/none", lambda _: False)
    assert store.has("old")


def test_a_collector_without_a_beat_stops(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = store.open()
    with storage.inventory.exclusively():
        with monkeypatch.context() as patched:
            patched.setattr(inventory, "MAX_SILENCE_S", -1.0)
            with pytest.raises(NotExclusiveError, match="no sign of life"):
                storage.inventory.remove_unless("stages/none", lambda _: False)
        with monkeypatch.context() as patched:
            patched.setattr(inventory, "MAX_HOLD_S", -1.0)
            with pytest.raises(NotExclusiveError, match="has blocked others"):
                storage.inventory.remove_unless("stages/none", lambda _: False)
        assert storage.inventory.remove_unless("stages/none", lambda _: False)


def test_a_killed_collector_of_this_machine_keeps_nobody(store: Store) -> None:
    gone = "deadbeef.1.1"
    here = own_stamp().split(".")[0]
    store.objects.put("collecting/0", f"{here}.999999.1 x".encode())
    assert not store.open()._collecting.wait_until_over()
    store.objects.put("collecting/1", f"{gone} x".encode())
    with pytest.raises(StoreError, match="another garbage collection"):
        store.collect()
