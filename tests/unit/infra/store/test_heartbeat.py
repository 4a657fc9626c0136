"""Beats and watchers: silence by the watcher's clock, a full disk, stalled phases."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import env
from infra.store import heartbeat
from infra.store.heartbeat import BEAT_BYTES, Beat, BeatWatch, Heartbeat, Stall, read_beat

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = (
    "import sys, time; from pathlib import Path; from infra.store.heartbeat import Heartbeat\n"
    "with Heartbeat(Path(sys.argv[1]), 0.02): time.sleep(600)"
)


def wait_until(predicate: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end, "deadline"
        time.sleep(0.01)


def beat_of(path: Path) -> Beat:
    beat = read_beat(path)
    assert beat is not None
    return beat


def test_no_file_is_no_heartbeat(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "heartbeat") is None


def test_phase_and_step_reach_the_file_which_keeps_its_size(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    with Heartbeat(path, every_s=0.02) as beat:
        assert (beat_of(path).phase, beat_of(path).step) == ("start", None)
        inode = path.stat().st_ino
        beat.enter("train", 60)
        beat.step = 7
        wait_until(lambda: (beat_of(path).phase, beat_of(path).step) == ("train", 7))
        beat.enter("evaluate", 60)
    # The last word is written when the context ends, without waiting for the next beat.
    assert beat_of(path).phase == "evaluate"
    assert (path.stat().st_ino, path.stat().st_size) == (inode, BEAT_BYTES)
    assert os.listdir(tmp_path) == ["heartbeat"]


def test_a_stopped_process_is_silent_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=env.child_environment(PYTHONPATH=str(ROOT)),
    )
    watch = BeatWatch(lambda: read_beat(path))
    try:
        wait_until(lambda: read_beat(path) is not None)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: watch.look() > 0.5)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: watch.look() < 0.3)
    finally:
        process.kill()
        process.wait(60)


class Clocks:
    """A clock that the test moves, and a beat that the test changes."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.beat: Beat | None = Beat(process="p", number=1, phase="train", step=None)
        self.broken = False
        self.watch = BeatWatch(self._read, lambda: self.now_s)

    def _read(self) -> Beat | None:
        if self.broken:
            raise OSError(errno.EIO, "disk")
        return self.beat

    def look_after(self, passed_s: float) -> float:
        self.now_s += passed_s
        return self.watch.look()


def test_silence_counts_by_the_watchers_own_clock() -> None:
    clocks = Clocks()
    assert clocks.look_after(0) == 0
    assert clocks.look_after(2) == 2
    assert clocks.look_after(3) == 5
    clocks.beat = Beat(process="p", number=2, phase="train", step=None)
    assert clocks.look_after(1) == 0


def test_time_in_which_the_watcher_could_not_look_does_not_count() -> None:
    clocks = Clocks()
    clocks.look_after(0)
    clocks.broken = True
    for _ in range(30):
        with pytest.raises(OSError, match="disk"):
            clocks.look_after(3)
    clocks.broken = False
    assert clocks.look_after(3) == 0
    assert clocks.look_after(1) == 1
    # Nor does the time in which the watcher itself was stopped.
    assert clocks.look_after(3600) == 1 + heartbeat.MAX_GAP_S


@pytest.mark.parametrize("skew_s", [120.0, -120.0])
def test_fault_row_25_clock_skew_makes_no_process_look_dead(tmp_path: Path, skew_s: float) -> None:
    """The writer is another machine's process, with another clock in all that it reads."""
    program = (
        "import time; now = time.time, time.time_ns\n"
        f"time.time = lambda: now[0]() + {skew_s}\n"
        f"time.time_ns = lambda: now[1]() + int({skew_s} * 1e9)\n"
        "from infra.store import heartbeat\n"
        f"heartbeat.own_stamp = lambda: 'another-boot 1 {{time.time()}}'\n{PROGRAM}"
    )
    path = tmp_path / "heartbeat"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=ROOT) as writer:
        try:
            wait_until(lambda: path.exists() and read_beat(path) is not None)
            watch = BeatWatch(lambda: read_beat(path))
            for _ in range(6):
                wait_until(lambda: read_beat(path) not in (None, watch.beat))
                written_at = time.time() + skew_s
                os.utime(path, (written_at, written_at))
                assert watch.look() == 0
            assert watch.beat is not None
            assert watch.beat.number > 5
        finally:
            writer.kill()


def test_a_full_disk_does_not_stop_the_beats(small_disk: Path) -> None:
    path = small_disk / "heartbeat"
    with Heartbeat(path, every_s=0.02):
        with pytest.raises(OSError, match="No space"):
            (small_disk / "filler").write_bytes(bytes(4_000_000))
        number = beat_of(path).number
        wait_until(lambda: beat_of(path).number > number + 5)


def test_fault_row_4_a_phase_without_progress_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls: list[Stall] = []
    stacks = tmp_path / "stacks.txt"
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with (
        stacks.open("w") as file,
        Heartbeat(tmp_path / "h", 0.02, stalls.append, file, {"train": 0.3}) as beat,
    ):

        def after(passed_s: float) -> list[Stall]:
            """What was reported since; the time passes for who saw what there was before."""
            for seconds in (0.0, passed_s):
                clock.now_s += seconds
                later = beat_of(tmp_path / "h").number + 2
                wait_until(lambda later=later: beat_of(tmp_path / "h").number >= later)
            return stalls

        beat.enter("load", 60)
        beat.enter("train", 60)
        for step in range(4):
            beat.step = step
            assert not after(0.2)
        for _ in range(3):
            beat.tick()
            assert not after(0.2)
        assert len(after(0.2)) == 1
        assert len(after(3600)) == 1
        wait_until(lambda: "a_phase_without_progress" in stacks.read_text())
    assert stalls == [Stall("train", 3, 0.3)]


def test_an_unwritable_place_fails_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError), Heartbeat(tmp_path / "file/h", 1):
        pass


def test_a_read_error_is_not_absence(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    with pytest.raises(IsADirectoryError):
        read_beat(tmp_path / "h")


@pytest.mark.parametrize("data", [b"", b"{}", b"00000000 {}", bytes(90), b"\xff"])
def test_what_a_power_loss_left_is_no_heartbeat(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "h").write_bytes(data)
    assert read_beat(tmp_path / "h") is None


def test_the_interval_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need > 0"):
        Heartbeat(tmp_path / "h", 0)
