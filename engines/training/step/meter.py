"""Speed of optimizer steps: tokens and operations per second, and the share of peak FLOPs.

Does not synchronize the device: the work of a step has to be done when the step ends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """Work of one step on all devices together.

    Attributes:
        flops: model FLOPs (`TrainingFlops.model_flops`); None if the model cannot be counted.
        hardware_flops: including recomputed work; None is the same as `flops`.
    """

    num_tokens: int
    flops: float | None = None
    hardware_flops: float | None = None


class StepMeter:
    """Accumulates steps and turns them into metrics; peak FLOPs/s are those of one device."""

    def __init__(
        self,
        num_devices: int = 1,
        peak_flops_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices: got {num_devices}; need at least 1")
        self._num_devices = num_devices
        self._peak_flops_per_s = peak_flops_per_s
        self._clock = clock
        self._steps: list[tuple[StepWork, float]] = []

    @contextmanager
    def step(self, work: StepWork) -> Iterator[None]:
        """Time a step; one that raises does not count."""
        start = self._clock()
        yield
        self.record(work, self._clock() - start)

    def record(self, work: StepWork, seconds: float) -> None:
        """Add a step that was timed elsewhere."""
        self._steps.append((work, seconds))

    def take_metrics(self, max_memory_allocated_bytes: int | None = None) -> dict[str, float]:
        """Return the metrics since the last call, without unknown ones.

        Returns:
            `perf/tokens_per_s` of all devices; `perf/tflops_per_s` of one device in 10**12
            operations; `perf/mfu` and, if anything is recomputed, `perf/hfu`, shares of the peak;
            `perf/max_memory_allocated_gb` of this device in 10**9 bytes.
        """
        steps, self._steps = self._steps, []
        metrics: dict[str, float] = {}
        if max_memory_allocated_bytes is not None:
            metrics["perf/max_memory_allocated_gb"] = max_memory_allocated_bytes / 1e9
        seconds = sum(taken for _, taken in steps)
        if seconds <= 0:
            return metrics
        metrics["perf/tokens_per_s"] = sum(work.num_tokens for work, _ in steps) / seconds
        counted = [(work, work.flops) for work, _ in steps if work.flops is not None]
        if len(counted) < len(steps):
            return metrics
        device_seconds = seconds * self._num_devices
        flops = sum(done for _, done in counted)
        metrics["perf/tflops_per_s"] = flops / device_seconds / 1e12
        if self._peak_flops_per_s is None:
            return metrics
        metrics["perf/mfu"] = flops / device_seconds / self._peak_flops_per_s
        if any(work.hardware_flops is not None for work, _ in counted):
            hardware = sum(
                done if work.hardware_flops is None else work.hardware_flops
                for work, done in counted
            )
            metrics["perf/hfu"] = hardware / device_seconds / self._peak_flops_per_s
        return metrics
