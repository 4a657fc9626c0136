"""PF-PPO: answers are drawn again by how much their rewards can be trusted (arXiv:2409.06957).

A reward model is most reliable where it is most certain, so the samples of a step are resampled,
with replacement, by their rewards. Promises: what is drawn depends on the seed alone; each drawn
sample keeps the advantage that it had in the whole step.
"""

import torch
from torch import Tensor

from engines.config.algorithm import PfPpoConfig

_RANDOM_MAX, _RANDOM_REST = 0.4, 0.1
"""Weights of `max_random`."""


def resampling_weights(rewards_B: Tensor, config: PfPpoConfig) -> Tensor:
    """How likely each sample is to be drawn, not normalised.

    Args:
        rewards_B: (B,) rewards.
        config: `pow`: ``|R| ** weight_pow``; `max_min`: 1 for the largest and the smallest
            reward of the step and 0 for all between; `max_random`: 0.4 for the largest, 0.1 else.

    Returns:
        (B,) float64 >= 0.
    """
    rewards_B = rewards_B.to(torch.float64)
    if config.reweight_method == "pow":
        return rewards_B.abs() ** config.weight_pow
    is_max_B = rewards_B == rewards_B.max()
    if config.reweight_method == "max_min":
        return (is_max_B | (rewards_B == rewards_B.min())).to(torch.float64)
    return torch.full_like(rewards_B, _RANDOM_REST).masked_fill(is_max_B, _RANDOM_MAX)


def resample(rewards_B: Tensor, config: PfPpoConfig, seed: int) -> Tensor:
    """Which samples a step trains on.

    Args:
        rewards_B: (B,) rewards.
        config: of the weights.
        seed: of the draw.

    Returns:
        (B,) int64 indices, ascending, some of them more than once; each one once where no sample
        has a weight.
    """
    weights_B = resampling_weights(rewards_B, config)
    if rewards_B.numel() == 0 or float(weights_B.sum()) == 0:
        return torch.arange(rewards_B.numel())
    generator = torch.Generator().manual_seed(seed)
    # By the inverse of the cumulative weights: `multinomial` ends at 2^24 categories, in float32.
    ends_B = weights_B.cumsum(0)
    draws_B = torch.rand(rewards_B.numel(), generator=generator, dtype=torch.float64) * ends_B[-1]
    last = int(weights_B.nonzero().max())
    return torch.searchsorted(ends_B, draws_B, right=True).clamp(max=last).sort().values
