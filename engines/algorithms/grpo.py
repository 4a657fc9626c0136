"""Group-relative advantages: GRPO (arXiv:2402.03300), and Dr. GRPO (2503.20783) by a switch."""

import torch
from torch import Tensor

from engines.algorithms.groups import group_statistics
from engines.algorithms.parts import AdvantageInputs

STD_EPS = 1e-6


def grpo_advantages(inputs: AdvantageInputs) -> Tensor:
    """How much better each sample is than its group.

    GRPO with outcome rewards: ``(R - mean) / (std + 1e-6)``, std with n - 1. With
    `norm_adv_by_std_in_grpo: false` it is Dr. GRPO: ``R - mean``. Departures from the paper: eps
    is added to the std, a group of one sample gets 0, and a group of equal scores gets exactly 0
    (the rounding error of its mean would otherwise be blown up by the division).

    Args:
        inputs: scores and groups.

    Returns:
        (B,) float32; each group's values sum to 0.
    """
    groups = group_statistics(inputs.scores_B, inputs.group_index_B, inputs.num_groups)
    centred_B = inputs.scores_B - groups.mean_P[inputs.group_index_B]
    if inputs.algorithm.norm_adv_by_std_in_grpo:
        centred_B = centred_B / (groups.std_P + STD_EPS)[inputs.group_index_B]
    equal_B = groups.equal_P[inputs.group_index_B]
    return torch.where(equal_B, 0.0, centred_B).to(torch.float32)
