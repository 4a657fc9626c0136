"""The shipper: whatever was away and whoever died, the next contact tells the rest, once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tracked_world import (
    CLOSE_S,
    FINGERPRINT,
    GONE,
    MINE,
    PARENT,
    STAGE,
    Away,
    World,
    finished,
    losses,
    told,
    warnings,
)

from infra.store.canonical import canonical_json
from infra.store.stage_log import Holder
from infra.tracking import shown_stage
from infra.tracking.journal import Journal
from infra.tracking.ledger import Owner, RunEntry
from infra.tracking.promotion import PROMOTION, Decision
from infra.tracking.samples import KeptSample, KeptStep, write_samples
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import (
    TrackerRefusedError,
    TrackerSettings,
)
from infra.waiting import wait_for


def test_a_run_that_went_well_is_told_once_and_settled(world: World) -> None:
    world.train(1, 2)
    shipper = world.shipper()
    shipper.put(PARENT)
    shipper.put(STAGE)
    wait_for(lambda: world.tracker.path.exists() and world.seen()["metrics"], "metrics", 60.0, 0.01)
    world.train(1, 2, 3)
    shipper.journal_grew(STAGE.key)
    record = world.commit()
    told(
        shipper,
        STAGE.committed(record),
        finished(PARENT).model_copy(update={"stages": {"sft": STAGE.key}}),
    )
    seen = world.seen()
    assert seen["metrics"] == [("accuracy", 0, 0.5), *losses(1, 2, 3)]
    assert (seen["state"], seen["parent"]) == ("FINISHED", PARENT.key)
    assert seen["tags"]["output.digest"] == record.artifact.digest
    assert world.seen(PARENT)["state"] == "FINISHED"
    assert world.seen(PARENT)["tags"] == {"run.sft": STAGE.key}
    ledger = world.ledger()
    assert ledger.is_settled(STAGE.key)
    assert ledger.is_settled(PARENT.key)
    assert list(ledger.pending()) == []


def test_a_tracker_that_shows_no_output_is_told_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise TrackerRefusedError("no such\n endpoint")

    monkeypatch.setattr(world.tracker, "log_output", refuse)
    told(world.shipper(), PARENT, STAGE.committed(world.commit()))
    assert world.seen()["state"] == "FINISHED"
    assert world.ledger().is_settled(STAGE.key)
    assert warnings(caplog, shown_stage.__name__) == [
        "tracking: the tracker refused to show what sft made: no such endpoint"
    ]


def test_samples_are_shown_at_stage_end_up_to_a_limit(
    world: World,
) -> None:
    world.train(*range(1, 20))
    for step in range(1, 20):
        samples = tuple(sample(f"{step}-{place}") for place in range(20))
        write_samples(world.journal.parent, KeptStep(step=step, samples=samples))
    told(world.shipper(), PARENT, STAGE)
    assert '"samples"' not in world.tracker.path.read_text()
    told(world.shipper(), STAGE.committed(world.commit()))
    lines = [json.loads(line) for line in world.tracker.path.read_text().splitlines()]
    (shown,) = [line["samples"] for line in lines if "samples" in line]
    assert list(shown) == ["3", "7", "11", "15", "19"]
    assert sum(len(names) for names in shown.values()) <= shown_stage.MAX_SAMPLES
    (made,) = [line for line in lines if "output" in line]
    assert made["kind"] == "policy"


def sample(name: str) -> KeptSample:
    return KeptSample(
        name=name, group=0, prompt="1+1=", tokens=("2",), num_tokens=1, score=1.0, reward=1.0,
        finish_reason="stop",
    )  # fmt: skip


def test_bad_input_row_47_late_tracker_gets_parent_and_stages(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.tracker.away = True
    world.train(1, 2)
    shipper = world.shipper()
    shipper.put(PARENT)
    shipper.put(STAGE)
    wait_for(lambda: world.tracker.num_calls >= 4, "it to be asked again", 60.0, poll_s=0.01)
    (warning,) = warnings(caplog)
    assert f"it is kept in {world.ledger().directory} and told later" in warning
    world.tracker.away = False
    told(shipper, STAGE.committed(world.commit()), finished(PARENT))
    assert world.seen()["parent"] == PARENT.key
    assert world.seen()["metrics"][1:] == losses(1, 2)
    assert (world.seen()["state"], world.seen(PARENT)["state"]) == ("FINISHED", "FINISHED")


def test_what_one_run_could_not_tell_the_next_contact_tells(world: World) -> None:
    """The next one is of another recipe, and knows nothing of the first."""
    world.tracker.away = True
    world.train(1, 2)
    told(world.shipper(), PARENT, STAGE, STAGE.committed(world.commit()), finished(PARENT))
    assert not world.tracker.path.exists()
    world.tracker.away = False
    other = RunEntry(key="c" * 64, name="other", owner=MINE)
    told(world.shipper(), finished(other))
    assert world.seen()["metrics"][1:] == losses(1, 2)
    assert (world.seen()["state"], world.seen()["parent"]) == ("FINISHED", PARENT.key)
    assert world.seen(PARENT)["state"] == "FINISHED"
    assert list(world.ledger().pending()) == []


def test_killed_run_ends_as_killed_and_its_stage_as_it_ended(world: World) -> None:
    world.train(1)
    for entry in (PARENT, STAGE):
        world.ledger().put(entry.model_copy(update={"owner": GONE}))
    told_by(world.shipper())
    assert (world.seen(PARENT)["state"], world.seen()["state"]) == ("KILLED", "KILLED")
    assert world.seen()["metrics"] == losses(1)
    # Its job went on; nobody was there when it committed.
    world.train(1, 2, 3)
    told_by(world.shipper())
    assert world.seen()["metrics"] == losses(1, 2, 3)
    record = world.commit()
    told_by(world.shipper())
    seen = world.seen()
    assert (seen["state"], seen["tags"]["output.digest"]) == ("FINISHED", record.artifact.digest)
    assert list(world.ledger().pending()) == []


def test_what_is_known_already_is_not_asked_for_again(world: World) -> None:
    world.train(1)
    world.ledger().put(STAGE.model_copy(update={"owner": GONE, "parent": ""}))
    told_by(world.shipper())
    calls = world.tracker.num_calls
    told_by(world.shipper())
    assert world.tracker.num_calls == calls


def told_by(shipper: Shipper) -> None:
    shipper.begin()
    shipper.close(CLOSE_S)


def test_a_run_of_a_living_process_is_left_to_it(world: World) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        from infra.host.processes import identify

        process = identify(sleeper.pid)
        assert process is not None
        owner = Owner(host=MINE.host, process=process)
        world.ledger().put(PARENT.model_copy(update={"owner": owner}))
        told_by(world.shipper())
        assert world.tracker.num_calls == 0
    finally:
        sleeper.kill()
        sleeper.wait()


def test_an_answer_that_was_lost_doubles_nothing(world: World) -> None:
    world.train(1, 2)
    world.tracker.lose_answer = True
    told(world.shipper(), PARENT, STAGE)
    world.train(1, 2, 3)
    told(world.shipper(), STAGE)
    assert world.seen()["metrics"] == losses(1, 2, 3)


def test_process_killed_while_shipping_leaves_rest_to_the_next(world: World) -> None:
    world.train(*range(1, 200))
    code = f"""
        import os, signal
        from pathlib import Path
        from rlhf.testing.json_lines_tracker import JsonLinesTracker
        from infra.store.storage import open_storage
        from infra.tracking.journal import StageHistory
        from infra.tracking.ledger import Ledger, Owner, RunEntry
        from infra.tracking.shipper import Shipper
        from infra.tracking.tracker import TrackerSettings

        class Killed(JsonLinesTracker):
            def log_metrics(self, run_id, points, position):
                super().log_metrics(run_id, points[:50], "")
                os.kill(os.getpid(), signal.SIGKILL)

        home = Path({str(world.home)!r})
        tracker = Killed(TrackerSettings(home / "server-1"))
        history = StageHistory(open_storage(str(home / "store")))
        shipper = Shipper(Ledger(home, tracker.address, "store"), tracker, history)
        for text in {[e.model_dump_json() for e in (PARENT, STAGE)]!r}:
            entry = RunEntry.model_validate_json(text)
            shipper.put(entry.model_copy(update={{"owner": Owner.this_process()}}))
        shipper.close(600)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert len(world.seen()["metrics"]) == 50
    told_by(world.shipper())
    assert world.seen()["metrics"] == sorted(losses(*range(1, 200)))
    assert (world.seen(PARENT)["state"], world.seen()["state"]) == ("KILLED", "KILLED")


def test_a_forced_generation_is_a_run_of_its_own(world: World) -> None:
    world.train(1, 2)
    world.commit()
    store = world.history.storage
    store.attempts.hold(FINGERPRINT, Holder(id="again", process="test"), 2, "token")
    with Journal(store.channel(FINGERPRINT).local_dir(2) / "journal.jsonl") as journal:
        journal.metrics(1, {"train/loss": 1.0})
    forced = STAGE.model_copy(update={"key": "c" * 64, "generation": 2})
    first = STAGE.model_copy(update={"owner": GONE})
    told(world.shipper(), PARENT, first, forced)
    assert world.seen(forced)["metrics"] == losses(1)
    assert world.seen()["metrics"] == losses(1, 2)
    assert world.history.commit(FINGERPRINT, 2) is None
    assert world.history.commit(FINGERPRINT, 0) is not None


def test_each_server_is_told_everything_once(world: World) -> None:
    model = world.publish("model")
    decision = Decision(
        promoted=True, metric="accuracy", value=0.5, min_value=0.1, model_digest=model.digest,
        model_name="m", alias="champion",
    )  # fmt: skip
    record = world.commit(PROMOTION, decision_json=canonical_json(decision))
    stage = STAGE.model_copy(update={"inputs": {"model": model}}).committed(record)
    (world.home / "server-2").mkdir()
    for server in ("server-1", "server-1", "server-2"):
        tracker = Away(TrackerSettings(world.home / server))
        shipper = world.shipper(tracker)
        if not shipper.is_settled(STAGE.key):
            told(shipper, PARENT, stage)
        assert tracker.path.read_text().count('"model": "m"') == 1
        assert world.seen(tracker=tracker)["state"] == "FINISHED"


class LeftSlowly:
    """A lock; the test's thread sleeps right after it, so that the other one always gets there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.1)


def test_a_run_put_while_the_first_contact_is_made_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipper = world.shipper()
    monkeypatch.setattr(shipper, "_lock", LeftSlowly())
    ends: list[str] = []
    set_state = world.tracker.set_state

    def count(run_id: str, state: Any, tags: Any, metrics: Any) -> None:
        ends.append(run_id)
        set_state(run_id, state, tags, metrics)

    monkeypatch.setattr(world.tracker, "set_state", count)
    told(shipper, finished(PARENT), STAGE.committed(world.commit()))
    assert len(ends) == len(set(ends)) == 2


def test_news_of_a_run_that_was_not_put_yet_wait_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipper = world.shipper()
    told_before = finished(PARENT)
    shipper.put(told_before)
    shipper.journal_grew(STAGE.key)
    wait_for(lambda: shipper.is_settled(PARENT.key), "the first run", 60.0, poll_s=0.01)
    looked, look = threading.Event(), shipper._due

    def due() -> list[RunEntry]:
        looked.set()
        return look()

    monkeypatch.setattr(shipper, "_due", due)
    shipper.journal_grew(STAGE.key)
    assert looked.wait(60)
    world.train(1, 2)
    told(shipper, STAGE.committed(world.commit()))
    assert world.seen()["metrics"][1:] == losses(1, 2)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_that_lost_everything_is_told_everything(world: World, replaced: bool) -> None:
    world.train(1, 2)
    told(world.shipper(), PARENT, STAGE.committed(world.commit()), finished(PARENT))
    before = world.seen()
    world.tracker.path.unlink()
    if replaced:
        Away(TrackerSettings(world.home / "server-1")).origin()
        told(world.shipper(), finished(RunEntry(key="c" * 64, name="other", owner=MINE)))
    else:
        told_by(world.shipper())
    assert world.seen() == before


class Hanging:
    """A call that takes until the test lets it end."""

    def __init__(self, then: Callable[[], Any] | None = None) -> None:
        self.asked, self.ends = threading.Event(), threading.Event()
        self.num_ended = 0
        self._then = then

    def __call__(self) -> Any:
        self.asked.set()
        self.ends.wait(60)
        self.num_ended += 1
        return self._then() if self._then else ""


def test_fault_row_21_failure_logs_one_line_and_blocks_nothing(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tracker.away = True
    hanging = Hanging(world.tracker.origin)
    monkeypatch.setattr(world.tracker, "origin", hanging)
    shipper = world.shipper()
    for _ in range(50):
        shipper.put(STAGE)
    assert hanging.asked.wait(60)
    for _ in range(50):
        shipper.put(STAGE)
    assert hanging.num_ended == 0
    hanging.ends.set()
    told(shipper, PARENT)
    (warning,) = warnings(caplog)
    assert "ConnectionError: refused: line 2 line 3" in warning
    assert "\n" not in warning


def test_a_refusal_is_said_and_the_others_are_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.tracker.refuses = True
    told(world.shipper(), PARENT)
    assert "write-once" in caplog.text
    assert world.ledger().find(PARENT.key) == PARENT


def test_a_slow_tracker_is_not_waited_for_beyond_the_deadline(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging()
    monkeypatch.setattr(world.tracker, "origin", hanging)
    shipper = world.shipper()
    shipper.put(PARENT)
    shipper.close(0.2)
    assert hanging.num_ended == 0
    assert "the next run sends the rest" in warnings(caplog)[-1]
    hanging.ends.set()


def test_a_damaged_ledger_is_one_that_knows_nothing(world: World) -> None:
    told(world.shipper(), finished(PARENT))
    for path in world.ledger().directory.rglob("*.json"):
        path.write_bytes(os.urandom(20))
    assert world.ledger().find(PARENT.key) is None
    told(world.shipper(), finished(PARENT))
    assert world.seen(PARENT)["state"] == "FINISHED"
