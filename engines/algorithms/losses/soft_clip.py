"""Policy losses that weight the gradient of each token instead of cutting it off."""

import torch

from engines.algorithms.losses.ppo_clip import clip_range, probability_ratio
from engines.algorithms.options import SapoOptions
from engines.algorithms.parts import PolicyLossInputs, TokenLoss, options_as


def cispo_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """REINFORCE with a clipped, detached ratio as its weight: CISPO (arXiv:2506.13585 eq. 4).

    ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi``: every token keeps a gradient, the rare
    ones that PPO-clip would drop too. The paper leaves the lower side open (`clip_ratio_low` near
    1) and clips above.

    Args:
        inputs: logprobs, old logprobs and advantages of each token.

    Returns:
        The loss of each token; `actor/pg_clipfrac` marks tokens whose weight is clipped.
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
    """A sigmoid gate in place of the clip: SAPO (arXiv:2511.20347).

    ``-A (4 / tau) sigmoid(tau (r - 1))``, with `tau_pos` where A > 0 and `tau_neg` elsewhere. At
    r = 1 its gradient is that of the ratio; it fades as the ratio leaves 1 on either side.

    Args:
        inputs: logprobs, old logprobs and advantages of each token; options `tau_pos`, `tau_neg`.

    Returns:
        The loss of each token, for `seq-mean-token-mean`.
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

    No ratio and no clip, so it is right for one update of a batch that the policy itself sampled.

    Args:
        inputs: logprobs and advantages of each token.

    Returns:
        The loss of each token.
    """
    return TokenLoss(
        -inputs.advantages_T * inputs.logprobs_T,
        {"actor/ppo_kl": inputs.old_logprobs_T - inputs.logprobs_T.detach()},
    )
