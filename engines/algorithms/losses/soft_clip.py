"""Policy losses that weight the gradient of each token instead of cutting it off."""

import torch

from engines.algorithms.losses.ppo_clip import clip_range, probability_ratio
from engines.algorithms.options import SapoOptions
from engines.algorithms.parts import PolicyLossInputs, TokenLoss, options_as


def cispo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """CISPO (arXiv:2506.13585 eq. 4): REINFORCE weighted by a clipped, detached ratio.

    ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi``: every token keeps a gradient, also the
    rare ones that PPO-clip would drop. The paper leaves the lower side open (`clip_ratio_low` near
    1) and clips above. `actor/pg_clipfrac` marks tokens whose weight is clipped.
    """
    eps_low, eps_high = clip_range(inputs.algorithm)
    ratio_T = probability_ratio(inputs.logprobs_T.detach(), inputs.old_logprobs_T)
    weight_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    return TokenLoss(
        -weight_T * inputs.advantages_T * inputs.logprobs_T,
        {
            "actor/pg_clipfrac": (weight_T != ratio_T).to(torch.float32),
            "actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach(),
        },
    )


def sapo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """SAPO (arXiv:2511.20347): a sigmoid gate instead of the clip.

    ``-A (4 / tau) sigmoid(tau (r - 1))``, with `tau_pos` where A > 0 and `tau_neg` elsewhere. At
    r = 1 its gradient is that of the ratio; it fades as the ratio leaves 1 on either side.
    """
    options = options_as(SapoOptions, inputs.options)
    ratio_T = probability_ratio(inputs.logprobs_T, inputs.old_logprobs_T)
    positive_T = inputs.advantages_T > 0
    tau_T = torch.where(positive_T, options.tau_pos, options.tau_neg).to(ratio_T)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return TokenLoss(
        -inputs.advantages_T * gate_T,
        {"actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach()},
    )


def reinforce_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """``-A log pi`` of each token: REINFORCE (Williams 1992), and GPG (arXiv:2504.02546 eq. 6).

    Without ratio and clip, so it is correct for one update of a batch that the policy sampled.
    """
    return TokenLoss(
        -inputs.advantages_T * inputs.logprobs_T,
        {"actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach()},
    )
