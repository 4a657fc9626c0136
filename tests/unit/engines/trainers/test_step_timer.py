"""Wall time by phase."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from engines.trainers import step_timer
from engines.trainers.step_timer import PhaseClock


def test_phases_add_up_and_errors_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: now_s))
    clock = PhaseClock()
    with clock("gen"):
        now_s += 2
    now_s += 4
    with suppress(KeyError), clock("gen"):
        now_s += 8
        raise KeyError
    clock.add("load", 2.5)
    assert clock.seconds == {"gen": 10.0, "load": 2.5}
    assert clock.elapsed_s == 14.0
