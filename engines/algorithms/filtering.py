"""Dynamic sampling: which samples can still teach something."""

import torch
from torch import Tensor

from engines.algorithms.groups import group_statistics
from engines.config.algorithm import FilterGroupsConfig


def informative_samples(
    filter_groups: FilterGroupsConfig, scores_B: Tensor, group_index_B: Tensor
) -> Tensor:
    """The samples whose group has at least two different scores.

    DAPO, arXiv:2503.14476 eq. 11. A group of equal scores, or of one sample, has advantage 0 and
    only dilutes the mean.

    Args:
        filter_groups: the switch; off keeps everything.
        scores_B: (B,) scores.
        group_index_B: (B,) int64 >= 0, which prompt each sample answers.

    Returns:
        (B,) bool, True to keep.
    """
    if not filter_groups.enable or scores_B.numel() == 0:
        return torch.ones(scores_B.shape, dtype=torch.bool, device=scores_B.device)
    groups = group_statistics(scores_B, group_index_B, int(group_index_B.max()) + 1)
    return ~groups.equal_P[group_index_B]
