"""Dynamic sampling: select samples that have a learning signal."""

import torch
from torch import Tensor

from engines.algorithms.groups import group_statistics
from engines.config.algorithm import FilterGroupsConfig


def informative_samples(
    filter_groups: FilterGroupsConfig, scores_B: Tensor, group_index_B: Tensor
) -> Tensor:
    """Return (B,) bool, True for samples whose group has at least two different scores.

    DAPO, arXiv:2503.14476 eq. 11. A group of equal scores, or of one sample, has advantage 0 and
    only dilutes the mean. If `filter_groups` is off, all are kept.
    """
    if not filter_groups.enable or scores_B.numel() == 0:
        return torch.ones(scores_B.shape, dtype=torch.bool, device=scores_B.device)
    groups = group_statistics(scores_B, group_index_B, int(group_index_B.max()) + 1)
    return ~groups.equal_P[group_index_B]
