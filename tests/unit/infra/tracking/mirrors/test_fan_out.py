"""Several trackers that are told the same: each all of it, whatever becomes of another."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from infra.store.stage_log import Holder
from infra.store.storage import LocalStorage
from infra.tracking.history import StageHistory
from infra.tracking.journal import Journal
from infra.tracking.ledger import Ledger, Owner, RunEntry
from infra.tracking.mirrors.fan_out import FanOut
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings

FINGERPRINT = "f" * 64
OWNER = Owner.this_process()
RUN = RunEntry(key="a" * 64, name="run", owner=OWNER)
STAGE = RunEntry(
    key="b" * 64, name="sft", fingerprint=FINGERPRINT, parent=RUN.key, owner=OWNER
)  # fmt: skip


class Named(JsonLinesTracker):
    """Calls runs by names that mean nothing elsewhere, and may be away."""

    away = False

    def open_run(self, run: TrackedRun) -> str:
        if self.away:
            raise ConnectionError("refused")
        return super().open_run(run)

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint], position: str) -> None:
        if self.away:
            raise ConnectionError("refused")
        super().log_metrics(run_id, points, position)


class World:
    """A home with one stage's work, and three trackers."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = LocalStorage(home / "store")
        self.store.attempts.hold(FINGERPRINT, Holder(id="test", process="test"), 0)
        self.trackers: list[Named] = []
        for number in range(3):
            (home / str(number)).mkdir()
            self.trackers.append(Named(TrackerSettings(home / str(number))))

    def fan_out(self, num_mirrors: int) -> FanOut:
        first, *mirrors = [
            Shipper(
                Ledger(self.home, tracker.address, "store"),
                tracker,
                StageHistory(self.store),
                ship_every_s=0.01,
                retry_after_s=0.05,
            )
            for tracker in self.trackers[: 1 + num_mirrors]
        ]
        fan_out = FanOut(first, mirrors)
        fan_out.begin()
        return fan_out

    def train(self, *steps: int) -> None:
        path = self.store.channel(FINGERPRINT).local_dir(0) / "journal.jsonl"
        with Journal(path) as journal:
            for step in steps:
                journal.metrics(step, {"train/loss": 1.0 / step})

    def steps(self, number: int) -> list[int]:
        return [step for _, step, _ in self.trackers[number].run(STAGE.key)["metrics"]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def finished(entry: RunEntry) -> RunEntry:
    return entry.model_copy(update={"state": "FINISHED"})


def test_every_tracker_is_told_everything_once(world: World) -> None:
    fan_out = world.fan_out(2)
    fan_out.put(RUN)
    fan_out.put(STAGE)
    world.train(1, 2)
    fan_out.journal_grew(STAGE.key)
    fan_out.put(finished(STAGE))
    fan_out.close(10)
    assert fan_out.is_settled(STAGE.key)
    for number in range(3):
        assert world.steps(number) == [1, 2]
        assert world.trackers[number].run(STAGE.key)["state"] == "FINISHED"


def test_a_mirror_that_is_away_keeps_nothing_from_the_others(world: World) -> None:
    world.trackers[1].away = True
    world.train(1)
    fan_out = world.fan_out(2)
    fan_out.put(finished(STAGE))
    fan_out.close(10)
    assert not fan_out.is_settled(STAGE.key)
    assert world.steps(0) == world.steps(2) == [1]
    world.trackers[1].away = False
    later = world.fan_out(2)
    later.close(10)
    assert later.is_settled(STAGE.key)
    assert [world.steps(number) for number in range(3)] == [[1], [1], [1]]


def test_a_mirror_that_comes_later_is_told_of_what_is_used_again(world: World) -> None:
    world.train(1, 2)
    alone = world.fan_out(0)
    alone.put(finished(STAGE))
    alone.close(10)
    assert alone.is_settled(STAGE.key)
    both = world.fan_out(1)
    assert not both.is_settled(STAGE.key)
    known = both.find(STAGE.key)
    assert known is not None
    both.put(known)
    both.close(10)
    assert both.is_settled(STAGE.key)
    assert world.steps(0) == world.steps(1) == [1, 2]


def test_they_are_waited_for_together(world: World) -> None:
    for tracker in world.trackers:
        tracker.away = True
    fan_out = world.fan_out(2)
    fan_out.put(STAGE)
    began = time.monotonic()
    fan_out.close(0.2)
    assert time.monotonic() - began < 2
