"""No test depends on the speed of the machine: tests of the rule, and the rule over all tests."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from speed_rules import MIN_HANG_GUARD_S, findings

TESTS = Path(__file__).resolve().parents[1]
MEASURING = ("benchmarks/",)
"""What measures speed, and asserts nothing about it."""
FILES = [
    path
    for path in sorted(TESTS.rglob("*.py"))
    if not path.relative_to(TESTS).as_posix().startswith(MEASURING)
]
SLEEPS: Mapping[str, str] = {
    "e2e/test_healing.py::test_repeatedly_crashing_run_is_given_up_others_stay_ended": (
        "nothing is to happen any more; more time only finds more"
    ),
    "e2e/test_outages.py::test_prefect_outage_stops_no_job_and_the_flow_continues": (
        "the length of an outage, which the run outlives however long it is"
    ),
    "e2e/test_run_ends.py::test_fault_row_20_a_signal_during_the_start_leaves_nothing": (
        "the second signal is right at any moment of the end, and after it"
    ),
    "e2e/test_run_ends.py::test_fault_row_20_ctrl_c_twice_ends_the_job_and_everything": (
        "likewise"
    ),
    "unit/engines/weight_sync/test_in_process.py::"
    "test_sender_gathers_at_most_one_tensor_ahead_of_the_copy": (
        "lets a sender run ahead that must not; more time only finds more"
    ),
}
"""Tests that sleep for a fixed time, by file and name: why they are right at any speed."""

HEAD = """import asyncio, time
from time import monotonic as now
GUARD_S = 60.0
def took():
    return time.process_time()
def test_it(limit_s=20.0):
"""


def in_a_test(lines: str) -> str:
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    return f"{HEAD}{body}"


def last_line(lines: str) -> int:
    return HEAD.count("\n") + len(lines.splitlines())


@pytest.mark.parametrize(
    "lines",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 2",
        "began = time.monotonic()\ntook = time.monotonic() - began\nassert took < 2",
        "started = time.monotonic()\nassert 0.2 < time.monotonic() - started < 5",
        "started = time.process_time()\nassert time.process_time() - started <= 5",
        "started = time.process_time()\nassert time.process_time() - started <= 500",
        "started = time.thread_time()\nassert 1 > time.thread_time() - started",
        "started = now()\nassert now() - started < 2, 'slow'",
        "started = time.perf_counter_ns()\nassert time.perf_counter_ns() - started < 5e9",
        "started = time.monotonic()\nassert (time.monotonic() - started) * 1000 < 2000",
        "started = time.monotonic()\nassert num == 1 and time.monotonic() - started < 2",
        "began = time.process_time()\nassert took() - began < 2",
        "end = time.monotonic() + 20\nwhile work():\n    assert time.monotonic() < end",
        "end = time.monotonic() + UNKNOWN_S\nwhile work():\n    assert time.monotonic() < end",
        "a, took = now(), []\nfor _ in '12':\n    took.append(now() - a)\nassert min(took) < 1",
        "a = now()\none = now() - a\ntwo = now() - a\nassert two <= 12 * one",
        "a = now()\nassert now() - a < GUARD_S / 2",
    ],
)
def test_an_assert_about_speed_is_found(lines: str) -> None:
    assert findings(in_a_test(lines)) == [(last_line(lines), "asserts a time")]


@pytest.mark.parametrize(
    "lines",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 60",
        "began = time.monotonic()\nassert time.monotonic() - began < GUARD_S",
        "began = time.monotonic()\nassert time.monotonic() - began >= 2",
        "began = time.monotonic()\nassert 2 <= time.monotonic() - began < 2 * GUARD_S",
        "began = time.monotonic_ns()\nassert time.monotonic_ns() - began < 60e9",
        "end = time.monotonic() + 60\nwhile work():\n    assert time.monotonic() < end",
        "before = time.time()\nassert before < written() <= time.time()",
        "a = took()\none, two = took() - a, took() - a\nassert two <= 12 * one",
        "began = time.monotonic()\nassert len(log) < 2",
        "clock = Clock()\nbegan = clock.monotonic()\nassert clock.monotonic() - began < 2",
        "assert num_calls < 2",
    ],
)
def test_a_guard_an_order_and_a_growth_are_not(lines: str) -> None:
    assert findings(in_a_test(lines)) == []


@pytest.mark.parametrize(
    "lines",
    [
        "time.sleep(0.3)",
        "time.sleep(limit_s)",
        "for each in '12':\n    with each:\n        time.sleep(0.3)",
    ],
)
def test_a_sleep_of_a_fixed_length_is_found(lines: str) -> None:
    assert findings(in_a_test(lines)) == [(last_line(lines), "test_it sleeps")]
    asynchronous = in_a_test(lines.replace("time.sleep", "await asyncio.sleep"))
    asynchronous = asynchronous.replace("def test_it", "async def test_it")
    assert findings(asynchronous) == [(last_line(lines), "test_it sleeps")]


@pytest.mark.parametrize(
    "lines",
    [
        "while work():\n    time.sleep(0.3)",
        "def hang():\n    time.sleep(600)",
        "with pytest.raises(KeyboardInterrupt):\n    time.sleep(600)",
        "await asyncio.sleep(0)",
        "clock.sleep(3)",
    ],
)
def test_a_poll_a_hang_and_a_turn_for_others_are_not(lines: str) -> None:
    source = in_a_test(lines)
    assert findings(source.replace("def test_it", "async def test_it")) == []


def test_the_guard_is_long_enough_for_a_slow_machine() -> None:
    assert MIN_HANG_GUARD_S >= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_depends_on_speed(path: Path) -> None:
    name = path.relative_to(TESTS).as_posix()
    sleeping = {where for where in SLEEPS if where.startswith(f"{name}::")}
    found = findings(path.read_text(encoding="utf-8"))
    slept = {f"{name}::{what.split()[0]}" for _, what in found if what.endswith(" sleeps")}
    assert [(line, what) for line, what in found if not what.endswith(" sleeps")] == []
    assert slept == sleeping, "wait for what is to happen, or say above why nothing has to"
