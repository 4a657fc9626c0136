"""A KL to the reference that is paid token by token, out of the reward.

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
    """What the samples pay before any coefficient.

    Args:
        estimator: `algorithm.kl_penalty`.
        batch: with the columns `loss_mask`, `old_logprobs` and `ref_logprobs`.

    Returns:
        (T,) float32 KL of each trained token, 0 elsewhere; and its mean over each sample's
        tokens, averaged over the samples.
    """
    columns, mask_T = batch.columns, batch.columns["loss_mask"] > 0
    kl_T = kl_estimate(estimator, columns["old_logprobs"], columns["ref_logprobs"])
    kl_T = kl_T * mask_T
    return kl_T, float(mean_by_sequence(kl_T.double(), mask_T, batch).mean())


def next_coefficient(control: KlControlConfig, coef: float, kl: float, num_samples: int) -> float:
    """The coefficient of the next step.

    ``coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)`` where it is adaptive.

    Args:
        control: fixed or adaptive, target and horizon.
        coef: of this step.
        kl: mean KL of this step.
        num_samples: n, of this step.

    Returns:
        `coef` itself where it is fixed.
    """
    if control.type == "fixed":
        return coef
    error = min(max(kl / control.target_kl - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (1 + error * num_samples / control.horizon)
