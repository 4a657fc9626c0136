"""KL(policy || reference) from the logprobs of sampled tokens: estimators, and a KL in the reward.

Schulman, "Approximating KL divergence" (2020). With d = log pi - log pi_ref on tokens sampled
from pi: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The *gradient* of k1 is zero on average and
that of k3 is biased as a loss; a trailing `+` keeps the estimator's value and takes the gradient
of k2, whose expectation is the gradient of the KL.

A KL that is subtracted from the reward of each token (Ziegler et al., arXiv:1909.08593 sec. 2.2)
reaches earlier tokens through the returns, unlike one in the loss, and has no gradient of its own.
"""

import math

import torch
from torch import Tensor

from engines.algorithms.parts import find_part
from engines.algorithms.sequences import mean_by_sequence
from engines.config.algorithm import KlControlConfig
from engines.config.rows import KL_ESTIMATORS
from engines.types import TokenBatch

K3_BEND = 2.6104
"""Value of -d in nats from which k3 continues as a line; exp(x) - 1 - x is about 10 there."""
_MAX_ERROR = 0.2


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return (T,) d: unbiased, of either sign, high variance."""
    return logprobs_T - ref_logprobs_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return (T,) |d|."""
    return (logprobs_T - ref_logprobs_T).abs()


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return (T,) d^2 / 2: biased, low variance, never negative."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return (T,) exp(-d) - 1 + d: unbiased, never negative.

    For a policy far from the reference (d below about -2.6, value 10) it continues as a line: the
    value stays finite and the gradient keeps its slope. A clamp would remove the gradient there.
    """
    negative_d_T = ref_logprobs_T - logprobs_T
    near_T = negative_d_T.clamp(max=K3_BEND)
    slope = math.expm1(K3_BEND)
    line_T = slope - K3_BEND + slope * (negative_d_T - K3_BEND)
    return torch.where(negative_d_T <= K3_BEND, near_T.expm1() - near_T, line_T)


def kl_estimate(name: str, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return (T,) the named estimate; `name` may end in `+` for the gradient of k2.

    Raises:
        UnknownPluginError: there is no such estimator.
    """
    value_T = find_part(KL_ESTIMATORS, name.removesuffix("+")).function(logprobs_T, ref_logprobs_T)
    if not name.endswith("+"):
        return value_T
    gradient_T = k2(logprobs_T, ref_logprobs_T)
    return value_T.detach() + gradient_T - gradient_T.detach()


def reward_kl(estimator: str, batch: TokenBatch) -> tuple[Tensor, float]:
    """Return the KL in the reward, before any coefficient.

    Returns:
        (T,) float32 KL of each trained token, 0 elsewhere; and its mean over each sample's
        tokens, averaged over the samples.
    """
    columns, mask_T = batch.columns, batch.columns["loss_mask"] > 0
    kl_T = kl_estimate(estimator, columns["old_logprobs"], columns["ref_logprobs"]) * mask_T
    return kl_T, float(mean_by_sequence(kl_T.double(), mask_T, batch).mean())


def next_coefficient(control: KlControlConfig, coef: float, kl: float, num_samples: int) -> float:
    """Return the reward's KL coefficient for the next step; a `fixed` one is unchanged.

    Adaptive: ``coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)`` with n = `num_samples`.
    """
    if control.type == "fixed":
        return coef
    error = min(max(kl / control.target_kl - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (1 + error * num_samples / control.horizon)
