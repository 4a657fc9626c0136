"""Step checkpoints that one machine saves, and another continues from."""

import time
from functools import partial
from pathlib import Path

import pytest
from rlhf.testing.fault_proxy import FaultProxy

from engines.checkpoint.step_store import StepCheckpoints, TrainerState
from infra.errors import FencedError, StoreUnreachableError
from infra.store.s3 import mirror as steps_module
from infra.store.s3 import objects as objects_module
from infra.store.s3.objects import Objects, S3Address
from infra.store.s3.storage import S3Channel, S3Storage
from infra.store.stage_log import Holder
from infra.store.stage_spec import Adoption
from infra.store.step_directories import newest_valid, step_directories
from infra.tracking.journal import Journal
from tasks.runner.earlier_work import HalfTrained, link_adopted

FINGERPRINT = "f" * 64
PLACE = f"work/{FINGERPRINT}/steps-0"
LAST = 1000
"""A step behind all of them."""


@pytest.fixture
def objects(uri: str) -> Objects:
    return Objects(S3Address.parse(uri))


@pytest.fixture
def channel(uri: str) -> S3Channel:
    return S3Storage(uri).channel(FINGERPRINT)


def save(steps: Path, *numbers: int, text: str = "weights", keep: int = 2) -> None:
    for step in numbers:
        checkpoints = StepCheckpoints(steps, keep)
        checkpoints.save(step, partial(write, f"{text} of {step}"), TrainerState(step))


def write(content: str, directory: Path) -> None:
    (directory / "w").write_text(content)


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str) -> S3Channel:
    """The channel on another machine."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / f"machine-{time.time_ns()}"))
    return S3Storage(uri).channel(FINGERPRINT)


def shipped(objects: Objects) -> list[int]:
    names = (each.name for each in objects.listed(f"{PLACE}/"))
    return [int(name.split("/")[3][:8]) for name in names if name.endswith("/manifest.json")]


def test_another_machine_continues_from_the_newest(
    uri: str,
    objects: Objects,
    channel: S3Channel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = channel.steps_dir(0)
    for step in (1, 2, 3):
        save(steps, step)
        channel.ship_steps(steps)
    assert shipped(objects) == [2, 3], "as many as the trainer keeps"
    other = elsewhere(monkeypatch, tmp_path, uri)
    assert not other.steps_dir(0).exists()
    assert other.step_numbers(other.steps_dir(0)) == [2, 3]
    assert S3Storage(uri).with_steps() == [FINGERPRINT]
    other.fetch_steps(other.steps_dir(0), LAST)
    found = StepCheckpoints(other.steps_dir(0), 2).latest_valid()
    assert found is not None
    assert (found.step, (found.path / "w").read_text()) == (3, "weights of 3")
    save(other.steps_dir(0), 4)
    other.ship_steps(other.steps_dir(0))
    assert shipped(objects) == [3, 4]


def test_what_is_here_and_as_new_is_not_fetched(channel: S3Channel, proxy: FaultProxy) -> None:
    steps = channel.steps_dir(0)
    save(steps, 1, 2)
    channel.ship_steps(steps)
    proxy.requests.clear()
    channel.fetch_steps(steps, LAST)
    assert not [each for each in proxy.requests if "checkpoint/w" in each.path]


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_damaged_one_is_skipped_for_the_one_before(
    uri: str,
    objects: Objects,
    channel: S3Channel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    steps = channel.steps_dir(0)
    save(steps, 1, 2)
    channel.ship_steps(steps)
    newest = objects.children(f"{PLACE}/")[-1]
    if damage == "flip":
        objects.put(f"{PLACE}/{newest}/checkpoint/w", b"weights of 3")
    elif damage == "remove":
        objects.delete([f"{PLACE}/{newest}/checkpoint/w"])
    else:
        objects.put(f"{PLACE}/{newest}/manifest.json", b"{}")
    other = elsewhere(monkeypatch, tmp_path, uri)
    other.fetch_steps(other.steps_dir(0), LAST)
    found = newest_valid(other.steps_dir(0))
    assert found is not None
    assert found[0] == 1
    assert "skipping the checkpoint of step 2" in caplog.text


def test_a_damaged_one_here_is_replaced_by_the_sound_one_there(channel: S3Channel) -> None:
    steps = channel.steps_dir(0)
    save(steps, 1)
    channel.ship_steps(steps)
    (steps / "step-00000001/checkpoint/w").write_text("damaged!!!!!")
    channel.fetch_steps(steps, LAST)
    found = newest_valid(steps)
    assert found is not None
    assert (found[1] / "checkpoint/w").read_text() == "weights of 1"


def test_an_upload_that_is_cut_is_not_seen_and_is_made_good(
    objects: Objects, channel: S3Channel, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "CREATE_DEADLINE_S", 0.0)
    objects.require_conditions()
    steps = channel.steps_dir(0)
    save(steps, 1)
    for part in ("checkpoint/w", "manifest.json"):
        proxy.fail("cut request", "PUT", part, times=2)
        with pytest.raises(StoreUnreachableError):
            channel.ship_steps(steps)
        assert shipped(objects) == []
    proxy.heal()
    channel.ship_steps(steps)
    assert shipped(objects) == [1]


def test_other_content_of_a_step_is_another_checkpoint(
    uri: str,
    objects: Objects,
    channel: S3Channel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(channel.steps_dir(0), 1)
    channel.ship_steps(channel.steps_dir(0))
    other = elsewhere(monkeypatch, tmp_path, uri)
    save(other.steps_dir(0), 1, text="other weights")
    other.ship_steps(other.steps_dir(0))
    assert shipped(objects) == [1, 1]
    third = elsewhere(monkeypatch, tmp_path, uri)
    third.fetch_steps(third.steps_dir(0), LAST)
    found = newest_valid(third.steps_dir(0))
    assert found is not None
    assert (found[1] / "checkpoint/w").read_text().endswith("weights of 1")


def test_a_job_ships_as_it_saves_and_its_journal_first(
    objects: Objects, channel: S3Channel, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "SHIP_EVERY_S", 0.05)
    steps = channel.steps_dir(0)
    with Journal(channel.local_dir(0) / "journal.jsonl") as journal:
        channel.share_steps(0, steps, LAST, lambda: None)
        journal.metrics(1, {"loss": 1.0})
        save(steps, 1)
        ends_at = time.monotonic() + 60
        while shipped(objects) != [1]:
            assert time.monotonic() < ends_at
            time.sleep(0.05)
    puts = [each.path for each in proxy.requests if each.method == "PUT"]
    order = [path for path in puts if "/journal/" in path or path.endswith("/manifest.json")]
    assert "/journal/" in order[0]
    adopted = Adoption(fingerprint="ab" * 32, generation=0, step=1, digest="cd" * 32, differs=("",))
    later = channel.steps_dir(2, adopted)
    save(later, 1)
    channel.ship_steps(later)
    channel.prune([0], steps)
    assert shipped(objects) == []
    assert step_directories(steps) == {}
    assert channel.step_numbers(later) == [1], "of another generation"
    channel.prune([], later)
    assert objects.listed(f"work/{FINGERPRINT}/steps-") == []
    assert objects.listed("with-steps/") == []


def test_what_is_adopted_on_one_machine_is_continued_on_a_third(
    uri: str, channel: S3Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = S3Storage(uri)
    owner.attempts.hold(FINGERPRINT, Holder(id="owner", process="here"), 0)
    with Journal(channel.local_dir(0) / "journal.jsonl") as journal:
        for step in (1, 2):
            journal.metrics(step, {"loss": 1.0})
            journal.progress(step, 3)
    save(channel.steps_dir(0), 1, 2, 3)
    channel.ship_steps(channel.steps_dir(0))
    assert channel.journal_bytes(0)
    elsewhere(monkeypatch, tmp_path, uri)
    submitter = S3Storage(uri)
    root = submitter.channel(FINGERPRINT).steps_dir(0)
    work = HalfTrained(FINGERPRINT, 0, root, 3, ("a.module",), ())
    adopted = link_adopted(work, submitter, "e" * 64, 0)
    assert adopted.step == 2, "the metrics of step 3 are not there"
    elsewhere(monkeypatch, tmp_path, uri)
    heir = S3Storage(uri).channel("e" * 64)
    steps = heir.steps_dir(0, adopted)
    heir.share_steps(0, steps, adopted.step, lambda: None)
    found = newest_valid(steps)
    assert found is not None
    assert (found[0], found[2]) == (2, adopted.digest)
    heir.prune([], steps)


def test_steps_beyond_the_journal_are_removed_and_not_fetched(
    uri: str, channel: S3Channel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was slower to ship its journal than to save, or another's that was fenced."""
    steps = channel.steps_dir(0)
    save(steps, 5, 10)
    channel.ship_steps(steps)
    channel.share_steps(1, steps, 7, lambda: None)
    assert list(step_directories(steps)) == [5]
    other = elsewhere(monkeypatch, tmp_path, uri)
    other.fetch_steps(other.steps_dir(0), 7)
    assert list(step_directories(other.steps_dir(0))) == [5]
    for each in (channel, other):
        each.prune([], each.steps_dir(0))


def test_replaced_owner_ships_and_removes_no_checkpoint(
    uri: str,
    objects: Objects,
    channel: S3Channel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(steps_module, "SHIP_EVERY_S", 0.05)
    asked: list[int] = []

    def refused() -> None:
        asked.append(1)
        raise FencedError("another took over")

    channel.share_steps(0, channel.steps_dir(0), LAST, refused)
    other = elsewhere(monkeypatch, tmp_path, uri)
    save(other.steps_dir(0), 6, 7)
    other.ship_steps(other.steps_dir(0))
    save(channel.steps_dir(0), 10)
    (shipments,) = channel._shipments
    shipments._thread.join(60)
    assert not shipments._thread.is_alive()
    assert "no more checkpoints go to the store: another took over" in caplog.text
    assert (shipped(objects), len(asked)) == ([6, 7], 1)
