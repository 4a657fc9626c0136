"""The exponential moving average of trained weights: how much of it stays, and its update.

With theta_0 the weights at its start, theta_t those after optimizer step t and d_t the decay of
that step: ``average_0 = theta_0``, ``average_t = d_t average_{t-1} + (1 - d_t) theta_t``
(arXiv:1412.6980 sec. 7.2). Departure from the paper: it begins at the weights, not at 0, so that no
bias is to be corrected.
Promises: plain float32 arithmetic on each rank's own parts, so that neither a layout nor a
checkpoint changes a bit of it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engines.config.training import EmaConfig

Averaged = Iterable[tuple[Tensor, Tensor]]
"""This rank's parts of the trained weights, each with its average: float32, of one shape."""


def decay_of_step(config: EmaConfig, step: int) -> float:
    """How much of the average stays in a step.

    Args:
        config: the decay, and whether it is warmed up.
        step: counted from 1, since the average began.

    Returns:
        `decay`; with warm-up at most ``(1 + step) / (10 + step)``.
    """
    return min(config.decay, (1 + step) / (10 + step)) if config.use_warmup else config.decay


@torch.no_grad()
def move_average(averaged: Averaged, decay: float) -> None:
    """One update, in place.

    Args:
        averaged: of this rank, after an optimizer step.
        decay: of the step.
    """
    for weights, average in averaged:
        average.lerp_(weights, 1 - decay)


@torch.no_grad()
def start_average(averaged: Averaged) -> None:
    """Have each average be the weights as they are."""
    for weights, average in averaged:
        average.copy_(weights)


@torch.no_grad()
def take_average(averaged: Averaged) -> None:
    """Have the weights be their average."""
    for weights, average in averaged:
        weights.copy_(average)
