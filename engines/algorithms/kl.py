"""Estimators of KL(policy || reference) from the logprobs of sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log pi - log pi_ref on tokens sampled
from pi: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The *gradient* of k1 is zero on average and
that of k3 is biased as a loss; a trailing `+` keeps the estimator's value and takes the gradient
of k2, whose expectation is the gradient of the KL.
"""

from torch import Tensor

from engines.algorithms.parts import find_part
from engines.config.plugins import KL_ESTIMATORS

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) d: unbiased, of either sign, high variance."""
    return logprobs_T - ref_logprobs_T


def absolute(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) |d|."""
    return (logprobs_T - ref_logprobs_T).abs()


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) d^2 / 2: biased, low variance, never negative."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) exp(-d) - 1 + d with d clamped to +-20 and the result to +-10: unbiased inside."""
    negative_d_T = (ref_logprobs_T - logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (negative_d_T.expm1() - negative_d_T).clamp(-K3_BOUND, K3_BOUND)


def kl_estimate(name: str, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """(T,) the named estimate; `name` may end in `+` for the gradient of k2.

    Args:
        name: of an estimator, optionally with a trailing `+`.
        logprobs_T: (T,) of the policy, with gradient.
        ref_logprobs_T: (T,) of the reference model.

    Returns:
        (T,) float32 with gradient.

    Raises:
        UnknownPluginError: no such estimator.
    """
    value_T = find_part(KL_ESTIMATORS, name.removesuffix("+")).function(logprobs_T, ref_logprobs_T)
    if not name.endswith("+"):
        return value_T
    gradient_T = k2(logprobs_T, ref_logprobs_T)
    return value_T.detach() + gradient_T - gradient_T.detach()
