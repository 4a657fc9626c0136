"""A KL to the reference that is subtracted from the reward of each token.

Ziegler et al. (arXiv:1909.08593 sec. 2.2). Unlike a KL in the loss it reaches earlier tokens
through the returns, and has no gradient of its own.
"""

from torch import Tensor

from engines.algorithms.kl import kl_estimate
from engines.algorithms.sequences import mean_by_sequence
from engines.config.algorithm import KlControlConfig
from engines.types import TokenBatch

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
