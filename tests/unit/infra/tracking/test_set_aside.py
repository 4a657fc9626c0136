"""An entry that a tracker cannot take, or takes long for: the others are told before it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from tracked_world import (
    CLOSE_S,
    MINE,
    PARENT,
    STAGE,
    Away,
    World,
    finished,
    losses,
    told,
    warnings,
)  # fmt: skip

from infra.tracking import shipper as shipper_module
from infra.tracking.ledger import RunEntry
from infra.tracking.promotion import PROMOTION
from infra.tracking.shipper import Shipper
from infra.waiting import wait_for

POISON = finished(RunEntry(key="0" * 64, name="poison", owner=MINE))
OTHERS = [
    finished(RunEntry(key=str(number) * 64, name=f"run{number}", owner=MINE))
    for number in range(1, 4)
]


class Poisoned(Away):
    """Answers, but cannot be told of one run; `how` is what it does then."""

    how: Callable[[], None] | None = None
    tried: list[str]

    def set_state(
        self, run_id: str, state: Any, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> None:
        self.tried.append(run_id)
        if self.how is not None and run_id == POISON.key:
            self.how()
        super().set_state(run_id, state, tags, metrics)

    def log_files(self, run_id: str, directory: Path, path: str) -> None:
        if self.how is not None:
            self.how()
        super().log_files(run_id, directory, path)


RETRY_AFTER_S = 0.05
"""Of shippers of a `World`, after the first failure."""


def too_large() -> None:
    raise RuntimeError("413 Request Entity Too Large")


def settled(world: World, *entries: RunEntry) -> list[str]:
    ledger = world.ledger()
    return [entry.name for entry in entries if ledger.is_settled(entry.key)]


@pytest.fixture
def tracker(world: World) -> Poisoned:
    tracker = Poisoned.__new__(Poisoned)
    tracker.__dict__.update(world.tracker.__dict__)
    tracker.tried = []
    world.tracker = tracker
    return tracker


@pytest.mark.parametrize("error", [RuntimeError("413"), KeyError("architectures"), OSError("EIO")])
def test_what_the_tracker_cannot_take_keeps_no_other_back(
    world: World, tracker: Poisoned, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    failed_at: list[float] = []

    def fail() -> None:
        failed_at.append(time.monotonic())
        raise error

    tracker.how = fail
    shipper = world.shipper()
    for entry in (POISON, *OTHERS):
        shipper.put(entry)
    wait_for(lambda: len(failed_at) >= 4, "it to be tried again", 60.0, poll_s=0.01)
    shipper.close(CLOSE_S)
    assert settled(world, POISON, *OTHERS) == ["run1", "run2", "run3"]
    (warning,) = warnings(caplog)
    assert f"did not take poison ({type(error).__name__}: {error}); the others go on" in warning
    for number, (before, after) in enumerate(pairwise(failed_at)):
        assert after - before >= RETRY_AFTER_S * 2**number, "it is tried more and more seldom"


def test_a_damaged_journal_keeps_no_other_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.train(1, 2)
    data = bytearray(world.journal.read_bytes())
    data[3] ^= 1
    world.journal.write_bytes(data)
    told(world.shipper(), STAGE.committed(world.commit()), finished(PARENT), *OTHERS)
    assert settled(world, STAGE, PARENT, *OTHERS) == ["run", "run1", "run2", "run3"]
    (warning,) = warnings(caplog)
    assert "JournalError" in warning


def test_a_decision_of_another_version_keeps_no_other_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = world.publish("model")
    record = world.commit(PROMOTION, decision_json=b'{"verdict": "yes"}')
    stage = STAGE.model_copy(update={"inputs": {"model": model}}).committed(record)
    told(world.shipper(), stage, *OTHERS)
    assert settled(world, stage, *OTHERS) == ["run1", "run2", "run3"]
    assert "did not take sft (ArtifactCorruptError: " in warnings(caplog)[0]


def test_the_next_run_tries_it_after_the_others(world: World, tracker: Poisoned) -> None:
    tracker.how = too_large
    told(world.shipper(), POISON)
    world.ledger().put(OTHERS[0])
    tracker.tried, tracker.how = [], None
    later = world.shipper()
    later.begin()
    later.close(CLOSE_S)
    assert tracker.tried == [OTHERS[0].key, POISON.key]
    assert settled(world, POISON) == ["poison"]
    assert world.ledger().aside() == set()


def test_news_of_what_was_set_aside_are_told(world: World, tracker: Poisoned) -> None:
    tracker.how = too_large
    shipper = world.shipper()
    shipper.put(POISON.model_copy(update={"state": "RUNNING"}))
    wait_for(world.ledger().aside, "it to be set aside", 60.0, poll_s=0.01)
    tracker.how = None
    told(shipper, POISON)
    assert settled(world, POISON) == ["poison"]


def test_a_tracker_that_went_away_meanwhile_is_away(
    world: World, tracker: Poisoned, caplog: pytest.LogCaptureFixture
) -> None:
    def go() -> None:
        tracker.away = True
        raise TimeoutError("no answer")

    tracker.how = go
    told(world.shipper(), POISON, *OTHERS)
    assert world.ledger().aside() == set()
    (warning,) = warnings(caplog)
    assert "could not take poison (TimeoutError: no answer)" in warning


def test_metrics_of_a_stage_arrive_though_they_failed_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the store was away for a moment: long before the stage ends."""
    records, failed = world.history.records, [False]

    def fail_once(*args: Any) -> Any:
        if not failed[0]:
            failed[0] = True
            raise OSError("Input/output error")
        return records(*args)

    monkeypatch.setattr(world.history, "records", fail_once)
    world.train(1, 2)
    shipper = world.shipper()
    shipper.put(PARENT)
    shipper.put(STAGE)
    deadline = time.monotonic() + 60
    while not world.tracker.path.exists() or world.seen()["metrics"] != losses(1, 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shipper.close(CLOSE_S)


class Upload:
    """A report on its way until somebody lets it arrive; what moves is what the test says.

    While it is on its way, a look of who waits for it takes `LOOK_S`; no other time passes.
    """

    LOOK_S = 0.1

    def __init__(self, entry: RunEntry) -> None:
        self.entry, self.moves = entry, True
        self.arrives_at_s = math.inf
        self.has_begun, self.arrives = Event(), Event()
        self.now_s = 0.0
        self._num_bytes = 0

    def send(self) -> None:
        self.has_begun.set()
        assert self.arrives.wait(60)

    def num_bytes(self) -> int:
        if self.now_s >= self.arrives_at_s:
            self.arrives.set()
        else:
            self.now_s += self.LOOK_S
        self._num_bytes += shipper_module.MOVED_BYTES if self.moves else 0
        return self._num_bytes

    def close(self, shipper: Shipper, upload_s: float, waited_s: float = 0.0) -> None:
        shipper.put(self.entry)
        assert self.has_begun.wait(60)
        shipper.close(0.3, upload_s, waited_s)


@pytest.fixture
def upload(world: World, tracker: Poisoned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    report = world.home / "report"
    report.mkdir()
    (report / "page").write_bytes(b"report")
    upload = Upload(finished(PARENT).model_copy(update={"files": report}))
    monkeypatch.setattr(shipper_module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(shipper_module, "time", SimpleNamespace(monotonic=lambda: upload.now_s))
    monkeypatch.setattr(shipper_module, "num_bytes_read", upload.num_bytes)
    tracker.how = upload.send
    yield upload
    upload.arrives.set()


@pytest.mark.parametrize("waited_s", [0.0, 1.0], ids=["alone", "behind another tracker"])
def test_an_upload_whose_bytes_move_is_waited_for(
    world: World, upload: Upload, caplog: pytest.LogCaptureFixture, waited_s: float
) -> None:
    upload.arrives_at_s = 1.0
    upload.close(world.shipper(), upload_s=60, waited_s=waited_s)
    assert settled(world, PARENT) == ["run"]
    (warning,) = warnings(caplog)
    assert "waiting while they move, up to 60 s" in warning


@pytest.mark.parametrize("upload_s", [0.0, 0.6])
def test_an_upload_is_waited_for_no_longer_than_that(
    world: World, upload: Upload, upload_s: float
) -> None:
    upload.close(world.shipper(), upload_s)
    assert not upload.arrives.is_set()
    assert settled(world, PARENT) == []
    assert world.ledger().aside() == {PARENT.key}, "the next run tells the others first"


def test_an_upload_that_stands_still_is_left(world: World, upload: Upload) -> None:
    upload.moves = False
    upload.close(world.shipper(), upload_s=3600)
    assert not upload.arrives.is_set()
    assert settled(world, PARENT) == []
