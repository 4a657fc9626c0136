"""Several trackers that are told the same: each all of it, whatever becomes of another."""

from collections.abc import Sequence
from pathlib import Path
from threading import Barrier, Event

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from infra.store.stage_log import Holder
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, StageHistory
from infra.tracking.ledger import Ledger, Owner, RunEntry
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings
from infra.waiting import wait_for
from tasks.runner.recorder import FanOut

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

    def fan_out(self, num_mirrors: int, ship_every_s: float = 0.01) -> FanOut:
        first, *mirrors = [
            Shipper(
                Ledger(self.home, tracker.address, "store"),
                tracker,
                StageHistory(self.store),
                ship_every_s=ship_every_s,
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
    fan_out.close(600)
    assert fan_out.is_settled(STAGE.key)
    for number in range(3):
        assert world.steps(number) == [1, 2]
        assert world.trackers[number].run(STAGE.key)["state"] == "FINISHED"


def test_a_mirror_that_is_away_keeps_nothing_from_the_others(world: World) -> None:
    world.trackers[1].away = True
    world.train(1)
    fan_out = world.fan_out(2)
    fan_out.put(finished(STAGE))
    fan_out.close(600)
    assert not fan_out.is_settled(STAGE.key)
    assert world.steps(0) == world.steps(2) == [1]
    world.trackers[1].away = False
    later = world.fan_out(2)
    later.close(600)
    assert later.is_settled(STAGE.key)
    assert [world.steps(number) for number in range(3)] == [[1], [1], [1]]


def test_a_mirror_that_comes_later_is_told_of_what_is_used_again(world: World) -> None:
    world.train(1, 2)
    alone = world.fan_out(0)
    alone.put(finished(STAGE))
    alone.close(600)
    assert alone.is_settled(STAGE.key)
    both = world.fan_out(1)
    assert not both.is_settled(STAGE.key)
    known = both.find(STAGE.key)
    assert known is not None
    both.put(known)
    both.close(600)
    assert both.is_settled(STAGE.key)
    assert world.steps(0) == world.steps(1) == [1, 2]


def test_they_are_told_to_the_end_at_the_same_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the end only where the others are about to, and no round comes by itself."""
    fan_out, all_of_them = world.fan_out(2, ship_every_s=3600.0), Barrier(3, timeout=60)
    fan_out.put(RUN)
    wait_for(
        lambda: all(tracker.path.exists() and RUN.key in tracker.path.read_text()
                    for tracker in world.trackers), "the beginning to be told", 60.0, 0.01
    )  # fmt: skip
    for tracker in world.trackers:
        monkeypatch.setattr(tracker, "set_state", lambda *_: all_of_them.wait())
    fan_out.put(finished(RUN))
    fan_out.close(600)
    assert fan_out.is_settled(RUN.key)


def test_they_are_waited_for_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later is waited for as if it had been waited for from the beginning."""
    waited, let_go = list[float](), Event()
    close = Shipper.close

    def noted(shipper: Shipper, deadline_s: float, upload_s: float, waited_s: float) -> None:
        waited.append(waited_s)
        close(shipper, deadline_s, upload_s, waited_s)

    monkeypatch.setattr(Shipper, "close", noted)
    for tracker in world.trackers:
        monkeypatch.setattr(tracker, "origin", lambda: str(let_go.wait(60)))
    fan_out = world.fan_out(2)
    fan_out.put(STAGE)
    fan_out.close(0.2)
    assert len(waited) == 3
    assert waited[0] < waited[1] < waited[2]
    assert waited[1] >= 0.2
    let_go.set()
