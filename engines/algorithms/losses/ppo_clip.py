"""The clipped policy-gradient loss: PPO-clip with clip-higher and dual clip."""

import torch
from torch import Tensor

from engines.algorithms.parts import PolicyLossInputs, TokenLoss
from engines.config.algorithm import AlgorithmConfig

LOG_RATIO_BOUND = 20.0


def clip_range(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Return (eps_low, eps_high): how far the ratio may leave 1 downwards and upwards."""
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    return (
        algorithm.clip_ratio if low is None else low,
        algorithm.clip_ratio if high is None else high,
    )


def probability_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return (T,) pi / pi_old with the log-ratio clamped to +-20, so that it is finite."""
    return (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_clip_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """PPO-clip: ``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``.

    Where A < 0 the loss is at most ``-A c`` (dual clip), so that one token whose probability
    exploded cannot dominate the step. `pg_clipfrac` marks tokens whose gradient the clip removed,
    `pg_clipfrac_lower` those that the dual clip removed, `ppo_kl` is log pi_old - log pi.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    advantages_T = inputs.advantages_T
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    upper_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * inputs.algorithm.clip_ratio_c
    negative_T = advantages_T < 0
    loss_T = torch.where(negative_T, torch.minimum(upper_T, bound_T), upper_T)
    return TokenLoss(
        loss_T,
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/pg_clipfrac_lower": (negative_T & (upper_T > bound_T)).to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )
