import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra import env
from infra.store import heartbeat
from infra.store.heartbeat import Heartbeat, heartbeat_age_s, read_heartbeat

ROOT = Path(__file__).resolve().parents[4]


def wait_until(predicate: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not predicate():
        assert time.monotonic() < end, "deadline"
        time.sleep(0.01)


def test_no_file_is_no_heartbeat(tmp_path: Path) -> None:
    assert heartbeat_age_s(tmp_path / "heartbeat.json") is None
    assert read_heartbeat(tmp_path / "heartbeat.json") is None


def test_phase_and_step_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, every_s=0.02) as beat:
        first = read_heartbeat(path)
        assert first is not None
        assert (first.pid, first.step, first.phase) == (os.getpid(), None, "start")
        beat.phase, beat.step = "train", 7
        wait_until(lambda: json.loads(path.read_text())["step"] == 7)
        values = json.loads(path.read_text())
        assert {name: values[name] for name in ("pid", "step", "phase")} == {
            "pid": os.getpid(),
            "step": 7,
            "phase": "train",
        }
        assert abs(values["time"] - time.time()) < 5
        beat.phase = "evaluate"
    # The last word is written when the context ends, without waiting for the next beat.
    last = read_heartbeat(path)
    assert last is not None
    assert last.phase == "evaluate"
    assert os.listdir(tmp_path) == ["heartbeat.json"]


def test_age_grows_when_the_process_is_stopped_and_falls_when_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    program = (
        "import sys, time; from pathlib import Path; from infra.store.heartbeat import Heartbeat\n"
        "with Heartbeat(Path(sys.argv[1]), 0.02): time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=env.child_environment(PYTHONPATH=str(ROOT)),
    )
    try:
        wait_until(path.exists)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: (heartbeat_age_s(path) or 0) > 0.5)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: (heartbeat_age_s(path) or 9) < 0.3)
    finally:
        process.kill()
        process.wait(30)
    time.sleep(0.1)
    assert (heartbeat_age_s(path) or 0) >= 0.1


def test_progress_ages_while_the_thread_still_beats(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, every_s=0.02):
        wait_until(lambda: json.loads(path.read_text())["progress_age_s"] > 0.3)
        state = read_heartbeat(path)
    assert state is not None
    assert state.progress_age_s >= 0.3 + state.age_s


def test_a_clock_that_jumps_ages_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, every_s=60):
        pass
    now = time.time()
    for jump_s in (3600.0, -3600.0):
        monkeypatch.setattr(heartbeat.time, "time", lambda jump_s=jump_s: now + jump_s)
        age_s = heartbeat_age_s(path)
        assert age_s is not None
        assert 0 <= age_s < 60


def test_another_machine_uses_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "heartbeat.json"
    with Heartbeat(path, every_s=60):
        pass
    monkeypatch.setattr(heartbeat, "_boot_id", lambda: "another")
    written = json.loads(path.read_text())["time"]
    for passed_s, expected in ((100.0, 100.0), (-100.0, 0.0)):
        monkeypatch.setattr(heartbeat.time, "time", lambda s=passed_s: written + s)
        assert heartbeat_age_s(path) == pytest.approx(expected, abs=1e-3)


def test_an_unwritable_place_fails_at_the_start_and_not_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FileNotFoundError), Heartbeat(tmp_path / "absent/h.json", 1):
        pass
    directory = tmp_path / "d"
    directory.mkdir()
    with Heartbeat(directory / "h.json", every_s=0.01):
        (directory / "h.json").unlink()
        for _ in range(200):  # the thread may be writing a temporary file just now
            try:
                directory.rmdir()
                break
            except OSError:
                for name in os.listdir(directory):
                    (directory / name).unlink(missing_ok=True)
        wait_until(lambda: "not written" in caplog.text)


def test_a_read_error_is_not_absence(tmp_path: Path) -> None:
    (tmp_path / "h.json").mkdir()
    with pytest.raises(IsADirectoryError):
        heartbeat_age_s(tmp_path / "h.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"pid": "x"}', bytes(90), b"\xff"])
def test_what_a_power_loss_left_is_no_heartbeat(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "h.json").write_bytes(data)
    assert heartbeat_age_s(tmp_path / "h.json") is None


def test_the_interval_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need > 0"):
        Heartbeat(tmp_path / "h.json", 0)
