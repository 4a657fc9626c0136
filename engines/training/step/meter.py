"""Speed of optimizer steps: tokens and operations per second, and the share of the peak.

Promises: figures speak of the steps since they were last taken, weighted by their duration.
Does not wait for a device: a step's end must be a point at which its work is done.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """What one step did, on all devices together.

    Attributes:
        num_tokens: tokens processed.
        flops: model FLOPs (`TrainingFlops.model_flops`); None where the model cannot be counted.
        hardware_flops: with what was computed twice; None is the same as `flops`.
    """

    num_tokens: int
    flops: float | None = None
    hardware_flops: float | None = None


class StepMeter:
    """Adds up steps and turns them into metrics.

    Args:
        num_devices: that share the work.
        peak_flops_per_s: of one device in the compute dtype; None where it is not known.
        clock: seconds, monotonic.
    """

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
        """Time a step; one that raises does not count.

        Args:
            work: what it is going to do.
        """
        start = self._clock()
        yield
        self.record(work, self._clock() - start)

    def record(self, work: StepWork, seconds: float) -> None:
        """Add a step that was timed elsewhere."""
        self._steps.append((work, seconds))

    def take_metrics(self, max_memory_allocated_bytes: int | None = None) -> dict[str, float]:
        """The figures since the last call; what is not known is absent.

        Args:
            max_memory_allocated_bytes: of this device; None leaves it out.

        Returns:
            `perf/tokens_per_s` of all devices; `perf/tflops_per_s` of one device in 10**12
            operations; `perf/mfu` and, where something is computed twice, `perf/hfu`, shares of
            the peak; `perf/max_memory_allocated_gb` in 10**9 bytes.
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
