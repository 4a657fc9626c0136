"""Soft overlong punishment: long answers lose score before they are cut off.

A KL to the reference that is subtracted from the reward of each token.

Ziegler et al. (arXiv:1909.08593 sec. 2.2). Unlike a KL in the loss it reaches earlier tokens
through the returns, and has no gradient of its own.
"""

import torch
from torch import Tensor

from engines.algorithms.kl import kl_estimate
from engines.algorithms.sequences import mean_by_sequence
from engines.config.algorithm import KlControlConfig, OverlongConfig
from engines.types import TokenBatch


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, overlong: OverlongConfig) -> Tensor:
    """Return (B,) float32 to add to the scores: 0, falling to `-penalty_factor` at the limit.

    DAPO, arXiv:2503.14476 eq. 13: with the buffer b, the limit L = `max_new_tokens` and the length
    with end token, ``min(0, -(length - (L - b)) / b * penalty_factor)``. All 0 if switched off.
    """
    if not overlong.enable:
        return torch.zeros(lengths_B.shape, dtype=torch.float32, device=lengths_B.device)
    excess_B = lengths_B.to(torch.float32) - (max_new_tokens - overlong.buffer_length)
    return (-excess_B / overlong.buffer_length * overlong.penalty_factor).clamp(max=0.0)


_MAX_ERROR = 0.2


def reward_kl(estimator: str, batch: TokenBatch) -> tuple[Tensor, float]:
    """Return the KL before any coefficient.

    Returns:
        (T,) float32 KL of each trained token, 0 elsewhere; and its mean over each sample's
        tokens, averaged over the samples.
    """
    columns, mask_T = batch.columns, batch.columns["loss_mask"] > 0
    kl_T = kl_estimate(estimator, columns["old_logprobs"], columns["ref_logprobs"])
    kl_T = kl_T * mask_T
    return kl_T, float(mean_by_sequence(kl_T.double(), mask_T, batch).mean())


def next_coefficient(control: KlControlConfig, coef: float, kl: float, num_samples: int) -> float:
    """Return the coefficient of the next step from that of this one; unchanged if fixed.

    Adaptive: ``coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)`` with n = `num_samples`.
    """
    if control.type == "fixed":
        return coef
    error = min(max(kl / control.target_kl - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (1 + error * num_samples / control.horizon)
