"""Speed figures, worked by hand on a clock that is set."""

import pytest

from engines.training.step.optimizer_step import StepMeter, StepWork


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_figures_by_hand() -> None:
    clock = SetClock()
    meter = StepMeter(num_devices=4, peak_flops_per_s=2e12, clock=clock)
    with meter.step(StepWork(num_tokens=1000, flops=6e12, hardware_flops=8e12)):
        clock.now_s += 1.0
    clock.now_s += 50.0  # between the steps: nobody's time
    with meter.step(StepWork(num_tokens=200, flops=2e12)):
        clock.now_s += 3.0
    # 8e12 operations in 4 s on 4 devices: 0.5e12 each, a quarter of the peak.
    assert meter.take_metrics(1_500_000_000) == {
        "perf/tokens_per_s": 300.0,
        "perf/tflops_per_s": pytest.approx(0.5),
        "perf/mfu": pytest.approx(0.25),
        "perf/hfu": pytest.approx(10 / 32),
        "perf/max_memory_allocated_gb": 1.5,
    }
    assert meter.take_metrics() == {}  # taken


def test_what_is_not_known_is_absent() -> None:
    meter = StepMeter()
    meter.record(StepWork(100, 4e12), 2.0)
    assert meter.take_metrics() == {"perf/tokens_per_s": 50.0, "perf/tflops_per_s": 2.0}
    meter = StepMeter(peak_flops_per_s=1e12)
    meter.record(StepWork(100, 4e12), 2.0)
    meter.record(StepWork(100), 2.0)  # one step without a count makes the sum meaningless
    assert meter.take_metrics() == {"perf/tokens_per_s": 50.0}
    meter.record(StepWork(100, 1e12), 2.0)
    assert meter.take_metrics() == {
        "perf/tokens_per_s": 50.0,
        "perf/tflops_per_s": 0.5,
        "perf/mfu": 0.5,
    }


def test_a_step_that_raises_does_not_count() -> None:
    clock = SetClock()
    meter = StepMeter(clock=clock)

    def broken_step() -> None:
        with meter.step(StepWork(100)):
            clock.now_s += 5.0
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        broken_step()
    assert meter.take_metrics(10**9) == {"perf/max_memory_allocated_gb": 1.0}
    meter.record(StepWork(0), 0.0)
    assert meter.take_metrics() == {}
    with pytest.raises(ValueError, match="num_devices: got 0"):
        StepMeter(num_devices=0)
