"""PF-PPO: answers are resampled by how far their rewards can be trusted (arXiv:2409.06957).

A reward model is most reliable where it is most certain, so the answers of each prompt are
resampled with replacement, weighted by their rewards. Promises: a prompt keeps its number of
answers; the draw depends on the seed alone; a drawn sample keeps its advantage in the whole step.
"""

import torch
from torch import Tensor

from engines.config.algorithm import PfPpoConfig

_RANDOM_MAX, _RANDOM_REST = 0.4, 0.1
"""Weights of `max_random`."""


def resampling_weights(rewards_B: Tensor, index_B: Tensor, config: PfPpoConfig) -> Tensor:
    """Return (B,) float64 >= 0, unnormalised weights of the answers to each prompt `index_B`.

    `pow`: ``|R| ** weight_pow``; `max_min`: 1 for the largest and the smallest reward of a prompt,
    else 0; `max_random`: 0.4 for the largest, else 0.1.
    """
    rewards_B = rewards_B.to(torch.float64)
    index_B = _dense(index_B)
    if config.reweight_method == "pow":
        return rewards_B.abs() ** config.weight_pow
    is_max_B = rewards_B == _extreme_B(rewards_B, index_B, "amax")
    if config.reweight_method == "max_min":
        return (is_max_B | (rewards_B == _extreme_B(rewards_B, index_B, "amin"))).to(torch.float64)
    return torch.full_like(rewards_B, _RANDOM_REST).masked_fill(is_max_B, _RANDOM_MAX)


def resample(rewards_B: Tensor, index_B: Tensor, config: PfPpoConfig, seed: int) -> Tensor:
    """Return the samples that a step trains on, (B,) int64 indices, ascending, with repetitions.

    Each prompt keeps its number of answers; if none of them has a weight, each is taken once.
    """
    weights_B = resampling_weights(rewards_B, index_B, config)
    generator = torch.Generator().manual_seed(seed)
    draws_B = torch.rand(rewards_B.numel(), generator=generator, dtype=torch.float64)
    chosen_B = torch.arange(rewards_B.numel())
    index_B = _dense(index_B)
    for places_G in index_B.argsort(stable=True).split(index_B.bincount().tolist()):
        # Inverse of the cumulative weights: draws are independent.
        ends_G = weights_B[places_G].cumsum(0)
        if float(ends_G[-1]) > 0:
            last = int(weights_B[places_G].nonzero().max())
            found_G = torch.searchsorted(ends_G, draws_B[places_G] * ends_G[-1], right=True)
            chosen_B[places_G] = places_G[found_G.clamp(max=last)]
    return chosen_B.sort().values


def _dense(index_B: Tensor) -> Tensor:
    """Number prompts from 0 without gaps: some may have been left out of the step."""
    return index_B.unique(return_inverse=True)[1]


def _extreme_B(rewards_B: Tensor, index_B: Tensor, which: str) -> Tensor:
    """Return (B,) the largest or smallest reward of each sample's prompt."""
    num_groups = int(index_B.max()) + 1 if index_B.numel() else 0
    extreme_P = rewards_B.new_zeros(num_groups)
    extreme_P.scatter_reduce_(0, index_B, rewards_B, which, include_self=False)
    return extreme_P[index_B]
