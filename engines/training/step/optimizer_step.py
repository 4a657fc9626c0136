"""One optimizer step: AdamW, clipping, learning rate, moving average of the weights, and speed.

Promises: AdamW's state exists before the first step, so that every checkpoint holds the same
tensors. The gradient norm is the same on every rank, also over several device meshes; parameters
replicated over tensor-parallel ranks count once.
Does not promise to synchronize the device: a step has to be done when `StepMeter` stops.

The exponential moving average is ``average_t = d_t average_{t-1} + (1 - d_t) theta_t``
(arXiv:1412.6980 sec. 7.2), with d_t the decay of step t. Unlike in the paper, it starts at the
weights, not at 0, so it needs no bias correction.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.checkpoint.engine_state import AVERAGE, MOMENTS
from engines.config.training import EmaConfig, OptimizerConfig


def started_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW (arXiv:1711.05101) with the state of 0 steps; `groups` have a weight decay."""
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for parameter in (p for group in groups for p in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter) for name in MOMENTS},
        }
        if config.ema is not None:
            optimizer.state[parameter][AVERAGE] = parameter.detach().clone()
    return optimizer


@torch.no_grad()
def clip_across_meshes(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`. Collective.

    Returns the norm before. Parameters are plain tensors or DTensors of several meshes; torch's
    `clip_grad_norm_` takes one mesh only.
    """
    kinds: dict[object, list[Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault(kind, []).append(grad)
    norms = [torch.nn.utils.get_total_norm(grads) for grads in kinds.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = float(torch.stack(whole).norm())
    # The same epsilon as in torch.
    scale = min(1.0, max_norm / (total + 1e-6))
    for grads in kinds.values():
        for grad in grads:
            grad.mul_(scale)
    return total


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate after `step` optimizer steps.

    The warm-up rises linearly and reaches `lr` at step `num_warmup_steps`; step 0 has
    `lr / (num_warmup_steps + 1)`. The cosine falls to `lr * min_lr_ratio` at `total_steps` (SGDR,
    arXiv:1608.03983 eq. 5) and stays there.
    """
    warmup = config.num_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


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
    """Times steps and returns metrics of their speed; peak FLOPs/s are those of one device."""

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
            operations; `perf/mfu` and (recomputed work included) `perf/hfu`, shares of the peak;
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


Averaged = Iterable[tuple[Tensor, Tensor]]
"""This rank's shards of the trained weights, each with its average: float32, equal shapes."""


def decay_of_step(config: EmaConfig, step: int) -> float:
    """Return the decay of step 1, 2, ...; with warm-up at most ``(1 + step) / (10 + step)``."""
    return min(config.decay, (1 + step) / (10 + step)) if config.use_warmup else config.decay


@torch.no_grad()
def move_average(averaged: Averaged, decay: float) -> None:
    """Update the averages in place, after an optimizer step."""
    for weights, average in averaged:
        average.lerp_(weights, 1 - decay)


@torch.no_grad()
def start_average(averaged: Averaged) -> None:
    """Set each average to its weights."""
    for weights, average in averaged:
        average.copy_(weights)


@torch.no_grad()
def take_average(averaged: Averaged) -> None:
    """Set the weights to their average."""
    for weights, average in averaged:
        weights.copy_(average)
