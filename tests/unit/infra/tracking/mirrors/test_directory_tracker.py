"""Trackers in directories: points are there once, wherever a process or the machine stopped."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config.plugins import TRACKERS
from infra import env
from infra.errors import ConfigError
from infra.tracking.mirrors.directory_tracker import DirectoryTracker
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings

RUN = TrackedRun("a" * 64, "rl_round_1", params={"rl": {"lr": 1e-6}})
NAMES = ("tensorboard", "wandb")
TELLER = """
import sys
from pathlib import Path
from engines.config.plugins import TRACKERS
from infra.tracking.tracker import MetricPoint, TrackedRun, TrackerSettings

tracker = TRACKERS.load(sys.argv[1])(TrackerSettings(Path(sys.argv[2])))
run_id = tracker.open_run(TrackedRun("a" * 64, "rl_round_1"))
while int(tracker.position(run_id) or 0) < 12:
    step = int(tracker.position(run_id) or 0) + 1
    points = [MetricPoint(name, step / 4, step, 1000 + step) for name in ("a/loss", "b")]
    tracker.log_metrics(run_id, points, str(step))
"""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    try:
        TRACKERS.find(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    return request.param


def tracker_of(name: str, home: Path) -> DirectoryTracker:
    """As a process that has just started has it."""
    return TRACKERS.load(name)(TrackerSettings(home))


def points(*steps: int) -> list[MetricPoint]:
    return [MetricPoint("loss", step / 4, step, 1000 + step) for step in steps]


def told(tracker: DirectoryTracker, run_id: str) -> list[tuple[str, int, float]]:
    """Every point of the whole file, in its order, by the reader that people's tools use."""
    path = tracker.points_path(run_id)
    if tracker.points_name.endswith(".jsonl"):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [(line["name"], line["step"], line["value"]) for line in lines]
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = LegacyEventFileLoader(str(path)).Load()
    values = [(value, event.step) for event in events for value in event.summary.value]
    return [
        (value.tag, step, value.simple_value) for value, step in values if value.tag != "settings"
    ]


def test_process_killed_before_counting_points_logs_them_once(name: str, tmp_path: Path) -> None:
    """SIGKILL between the points and the record that counts them, twice."""
    for _ in range(2):
        surroundings = env.child_environment(RLHF_FAULTS="atomic.before_rename=kill@3")
        command = [sys.executable, "-c", TELLER, name, str(tmp_path)]
        ended = subprocess.run(command, env=surroundings, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
    subprocess.run(command, env=env.child_environment(), timeout=60, check=True)
    tracker = tracker_of(name, tmp_path)
    run_id = tracker.open_run(RUN)
    assert told(tracker, run_id) == [
        (metric, step, step / 4) for step in range(1, 13) for metric in ("a/loss", "b")
    ]


@settings(max_examples=25)
@given(cut=st.integers(min_value=0, max_value=400))
def test_what_was_appended_in_part_is_appended_anew(cut: int) -> None:
    """The power went while points were written: any number of their bytes is there."""
    for name in NAMES:
        try:
            TRACKERS.find(name)
        except ConfigError:
            continue
        _append_in_part(name, cut)


def _append_in_part(name: str, cut: int) -> None:
    with tempfile.TemporaryDirectory() as home:
        tracker = tracker_of(name, Path(home))
        run_id = tracker.open_run(RUN)
        tracker.log_metrics(run_id, points(1, 2), "2")
        record = (tracker.root / run_id / "run.json").read_bytes()
        end = tracker.points_path(run_id).stat().st_size
        tracker.log_metrics(run_id, points(3, 4, 5), "5")
        (tracker.root / run_id / "run.json").write_bytes(record)
        whole = tracker.points_path(run_id).stat().st_size
        os.truncate(tracker.points_path(run_id), min(end + cut, whole))
        again = tracker_of(name, Path(home))
        assert again.position(run_id) == "2"
        again.log_metrics(run_id, points(3, 4, 5), "5")
        assert [step for _, step, _ in told(again, run_id)] == [1, 2, 3, 4, 5]


def test_points_that_were_lost_are_asked_for_again(name: str, tmp_path: Path) -> None:
    tracker = tracker_of(name, tmp_path)
    run_id = tracker.open_run(RUN)
    tracker.log_metrics(run_id, points(1, 2), "2")
    os.truncate(tracker.points_path(run_id), 10)
    for each in (tracker, tracker_of(name, tmp_path)):
        assert each.position(run_id) == ""
    tracker.log_metrics(run_id, points(1, 2, 3), "3")
    assert [step for _, step, _ in told(tracker, run_id)] == [1, 2, 3]


def test_two_processes_take_turns(name: str, tmp_path: Path) -> None:
    one, other = tracker_of(name, tmp_path), tracker_of(name, tmp_path)
    run_id = one.open_run(RUN)
    one.log_metrics(run_id, points(1), "1")
    other.log_metrics(run_id, points(1, 2), "2")
    one.log_metrics(run_id, points(1, 2, 3), "3")
    assert [step for _, step, _ in told(one, run_id)] == [1, 2, 3]


def test_numbers_that_are_not_finite_are_kept(name: str, tmp_path: Path) -> None:
    tracker = tracker_of(name, tmp_path)
    run_id = tracker.open_run(RUN)
    odd = [MetricPoint("nan", math.nan, 1, 1), MetricPoint("up", math.inf, 1, 1)]
    tracker.log_metrics(run_id, odd, "1")
    (_, _, nan), (_, _, up) = told(tracker, run_id)
    assert math.isnan(nan)
    assert up == math.inf


def test_a_name_that_is_no_file_name_makes_one(name: str, tmp_path: Path) -> None:
    tracker = tracker_of(name, tmp_path)
    parent = tracker.open_run(TrackedRun("b" * 64, "../a/b"))
    child = tracker.open_run(TrackedRun("c" * 64, "sft", parent))
    assert parent == ".._a_b-bbbbbbbb"
    assert child == f"{parent}/sft-cccccccc"
    assert tracker.run(child).parent == parent


def test_tensorboard_shows_every_run_with_its_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    tracker = tracker_of("tensorboard", tmp_path)
    parent = tracker.open_run(TrackedRun("b" * 64, "tiny"))
    child = tracker.open_run(TrackedRun("c" * 64, "sft", parent, {"lr": 1e-6}))
    tracker.log_metrics(child, points(1, 2), "2")
    tracker.set_state(parent, "FINISHED", {}, {"accuracy": 0.5})
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert set(shown.Runs()) == {parent, child}
    assert [s.value for s in shown.Scalars(child, "loss")] == [0.25, 0.5]
    (text,) = shown.Tensors(child, "settings")
    assert b'"lr": 1e-06' in text.tensor_proto.string_val[0]
