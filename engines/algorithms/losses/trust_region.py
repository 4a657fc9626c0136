"""Policy losses that bound a distance to the old policy instead of the ratio."""

import torch
from torch import Tensor

from engines.algorithms.losses.ppo_clip import clip_range, probability_ratio
from engines.algorithms.options import DroOptions
from engines.algorithms.parts import PolicyLossInputs, TokenLoss, options_as

_EPS = 1e-8


def dppo_tv_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO-TV (arXiv:2602.04879): REINFORCE with a truncated ratio and a bound of probability.

    ``-A sg(min(r, c)) log pi``, without gradient where ``pi - pi_old > eps_high`` and A > 0, or
    ``pi - pi_old < -eps_low`` and A < 0: the total variation of choosing this token or not. Unlike
    a bound of the ratio, it lets a rare token multiply its probability and holds a frequent one.
    c is `clip_ratio_c`; `actor/pg_clipfrac` marks tokens outside the bound.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    moved_T = inputs.logprobs_T.detach().exp() - inputs.old_logprobs_T.exp()
    too_far_T = torch.where(inputs.advantages_T > 0, moved_T > eps_high, moved_T < -eps_low)
    return _masked_reinforce(inputs, too_far_T)


def dppo_kl_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO-KL (arXiv:2602.04879): as `dppo_tv_loss`, bounded by the binary KL.

    ``KL = p_o log(p_o / p) + (1 - p_o) log((1 - p_o) / (1 - p))``, of choosing this token or not,
    from the old policy. A token is outside if it exceeds eps_high (A > 0) or eps_low (A < 0) and
    the gradient would lead further away.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    logprobs_T, old_T = inputs.logprobs_T.detach(), inputs.old_logprobs_T
    p_T, p_old_T = logprobs_T.exp(), old_T.exp()
    other_T = torch.log((1 - p_old_T + _EPS) / (1 - p_T + _EPS))
    kl_T = p_old_T * (old_T - logprobs_T) + (1 - p_old_T) * other_T
    up_T = inputs.advantages_T > 0
    leaves_T = torch.where(up_T, p_T > p_old_T, p_T < p_old_T)
    bound_T = torch.where(up_T, eps_high, eps_low).to(kl_T)
    return _masked_reinforce(inputs, leaves_T & (kl_T > bound_T))


def dro_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """DRO (arXiv:2405.19107): a quadratic pull to the old policy.

    ``-(A log pi - beta / 2 (log pi - log pi_old)^2)``. Departures: per token, where the paper
    has whole answers, and with an advantage, where it learns a value.
    """
    options = options_as(DroOptions, inputs.options)
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    pull_T = 0.5 * options.dro_beta * log_ratio_T.square()
    return TokenLoss(
        pull_T - inputs.advantages_T * inputs.logprobs_T,
        {"actor/ppo_kl": -log_ratio_T.detach(), "actor/dro_pull": pull_T.detach()},
    )


def _masked_reinforce(inputs: PolicyLossInputs, outside_T: Tensor) -> TokenLoss:
    ratio_T = probability_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T)
    weight_T = ratio_T.clamp(max=inputs.algorithm.clip_ratio_c)
    loss_T = -inputs.advantages_T * weight_T * inputs.logprobs_T
    return TokenLoss(
        torch.where(outside_T, 0.0, loss_T),
        {
            "actor/pg_clipfrac": outside_T.to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )
