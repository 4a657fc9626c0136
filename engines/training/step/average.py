"""Exponential moving average of the trained weights.

``average_t = d_t average_{t-1} + (1 - d_t) theta_t`` (arXiv:1412.6980 sec. 7.2), with d_t the decay
of step t. Unlike in the paper, it starts at the weights, not at 0, so it needs no bias correction.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engines.config.training import EmaConfig

Averaged = Iterable[tuple[Tensor, Tensor]]
"""This rank's shards of the trained weights, each with its average: float32, equal shapes."""


def decay_of_step(config: EmaConfig, step: int) -> float:
    """Return the decay of a step from 1; with warm-up at most ``(1 + step) / (10 + step)``."""
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
