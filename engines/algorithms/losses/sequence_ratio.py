"""Policy losses with a ratio of whole answers; aggregated as the mean over answers."""

import torch
from torch import Tensor

from engines.algorithms.losses.ppo_clip import clip_range
from engines.algorithms.parts import PolicyLossInputs, TokenLoss
from engines.algorithms.sequences import mean_by_sequence

SEQUENCE_LOG_RATIO_BOUND = 10.0


def gspo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """GSPO (arXiv:2507.18071 eq. 5 and 11): PPO-clip on the geometric mean of an answer's ratios.

    ``s = exp(mean of log(pi / pi_old))``. As in GSPO-token, each token has the value of s and the
    gradient of its own log-probability: ``s_t = sg(s) pi_t / sg(pi_t)``, so that advantages may
    differ between the tokens of an answer. ``max(-A s, -A clip(s))``; log s is at most 10; no dual
    clip.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    mean_B = mean_by_sequence(log_ratio_T.detach(), inputs.mask_T, inputs.batch)
    own_T = inputs.logprobs_T - inputs.logprobs_T.detach()
    log_s_T = (mean_B[inputs.batch.sequence_index_T] + own_T).clamp(max=SEQUENCE_LOG_RATIO_BOUND)
    ratio_T = log_s_T.exp()
    plain_T = -inputs.advantages_T * ratio_T
    clipped_T = -inputs.advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(
        torch.maximum(plain_T, clipped_T),
        {
            "actor/pg_clipfrac": (clipped_T > plain_T).to(torch.float32),
            "actor/ppo_kl": -log_ratio_T.detach(),
        },
    )


def geo_mean_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """GMPO (arXiv:2507.20673 eq. 4): the geometric mean of an answer's clipped ratios.

    ``-A exp(mean of d)``, where d is a token's log-ratio, clamped on the side where the objective
    would gain: above eps_high if A > 0, below -eps_low if A < 0. The clip ratios are bounds of
    log-ratios here; the paper uses 0.4 for both. If the advantages of an answer differ, their mean
    is used. `actor/pg_clipfrac` marks clamped tokens.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    log_ratio_T = inputs.logprobs_T - inputs.old_logprobs_T
    sign_T = inputs.advantages_T.sign()
    held_T = sign_T * torch.minimum(
        sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-eps_low, eps_high)
    )
    held_T = torch.where(sign_T == 0, log_ratio_T, held_T)
    mean_B = mean_by_sequence(held_T, inputs.mask_T, inputs.batch)
    ratio_B = mean_B.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp()
    advantage_B = mean_by_sequence(inputs.advantages_T, inputs.mask_T, inputs.batch)
    loss_T = (-advantage_B * ratio_B)[inputs.batch.sequence_index_T]
    return TokenLoss(
        loss_T,
        {
            "actor/pg_clipfrac": _held(held_T, log_ratio_T),
            "actor/ppo_kl": -log_ratio_T.detach(),
        },
    )


def _held(held_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    return (held_T != log_ratio_T).to(torch.float32)
