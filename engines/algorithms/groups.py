"""Statistics over groups: the samples that answer one prompt, in float64.

Groups may differ in size and be in any order. Letters: B samples, P groups.

Dynamic sampling: select samples that have a learning signal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.config.algorithm import FilterGroupsConfig


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each group, all (P,) float64; a group without samples has zeros.

    `std_P` is unbiased (n - 1), 0 for a single sample; `equal_P` is bool, exact equality.
    """

    count_P: Tensor
    mean_P: Tensor
    std_P: Tensor
    equal_P: Tensor


def group_statistics(scores_B: Tensor, group_index_B: Tensor, num_groups: int) -> GroupStatistics:
    """Return count, mean, standard deviation and equality of each group's scores."""
    scores_B = scores_B.to(torch.float64)
    zeros_P = torch.zeros(num_groups, dtype=torch.float64, device=scores_B.device)
    count_P = zeros_P.index_add(0, group_index_B, torch.ones_like(scores_B))
    mean_P = zeros_P.index_add(0, group_index_B, scores_B) / count_P.clamp(min=1)
    deviation_B = scores_B - mean_P[group_index_B]
    variance_P = zeros_P.index_add(0, group_index_B, deviation_B.square()) / (count_P - 1).clamp(
        min=1
    )
    lowest_P = zeros_P.scatter_reduce(0, group_index_B, scores_B, "amin", include_self=False)
    highest_P = zeros_P.scatter_reduce(0, group_index_B, scores_B, "amax", include_self=False)
    return GroupStatistics(count_P, mean_P, variance_P.sqrt(), lowest_P == highest_P)


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
