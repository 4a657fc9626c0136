"""Wall time by phase."""

import time

import pytest

from engines.trainers.phases import PhaseClock


def _fail_after(clock: PhaseClock, seconds: float) -> None:
    with clock("gen"):
        time.sleep(seconds)
        raise KeyError


def test_phases_add_up_and_errors_are_counted_too() -> None:
    clock = PhaseClock()
    with clock("gen"):
        time.sleep(0.02)
    with pytest.raises(KeyError):
        _fail_after(clock, 0.02)
    clock.add("load", 2.5)
    assert clock.seconds["gen"] >= 0.04
    assert clock.seconds["load"] == 2.5
    assert clock.elapsed_s >= clock.seconds["gen"]
