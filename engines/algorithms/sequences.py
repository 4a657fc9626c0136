"""Convert between tokens, sequences and groups (sequences that answer one prompt) of a batch.

Groups may differ in size and be in any order; their statistics are float64.
Letters: B sequences, P groups, T tokens, L trained tokens of the longest sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.types import TokenBatch


def sum_by_sequence(values_T: Tensor, batch: TokenBatch) -> Tensor:
    """Return (B,) the sum of each sequence's values, in their dtype."""
    sums_B = torch.zeros(batch.num_sequences, dtype=values_T.dtype, device=values_T.device)
    return sums_B.index_add(0, batch.sequence_index_T, values_T)


def num_trained_B(batch: TokenBatch, mask_T: Tensor) -> Tensor:
    """Return (B,) int64, the number of trained tokens of each sequence."""
    return sum_by_sequence(mask_T.to(torch.int64), batch)


def mean_by_sequence(values_T: Tensor, mask_T: Tensor, batch: TokenBatch) -> Tensor:
    """Return (B,) the mean over each sequence's trained tokens, with gradient; 0 without any."""
    total_B = sum_by_sequence(torch.where(mask_T, values_T, 0.0), batch)
    return total_B / num_trained_B(batch, mask_T).clamp(min=1)


def on_last_token(values_B: Tensor, mask_T: Tensor, batch: TokenBatch) -> Tensor:
    """Return (T,) each sequence's value on its last trained token, 0 elsewhere."""
    place_T = torch.arange(batch.num_tokens, device=mask_T.device)
    last_B = torch.full(
        (batch.num_sequences,), -1, dtype=torch.int64, device=mask_T.device
    ).scatter_reduce(0, batch.sequence_index_T, torch.where(mask_T, place_T, -1), "amax")
    has_B = last_B >= 0
    values_T = torch.zeros(batch.num_tokens, dtype=values_B.dtype, device=values_B.device)
    values_T[last_B[has_B]] = values_B[has_B]
    return values_T


class TrainedTokens:
    """The trained tokens of each sequence as rows of a matrix, without the tokens between them.

    Text of an environment or a tool is no action of the policy: the value and the return before it
    equal those after it. `mask_BL` is True where a row has a token; rows begin at column 0.
    """

    def __init__(self, mask_T: Tensor, batch: TokenBatch) -> None:
        self._places_N = mask_T.nonzero().flatten()
        self._rows_N = batch.sequence_index_T[self._places_N]
        counts_B = num_trained_B(batch, mask_T)
        starts_B = counts_B.cumsum(0) - counts_B
        order_N = torch.arange(self._places_N.numel(), device=mask_T.device)
        self._columns_N = order_N - starts_B[self._rows_N]
        self._num_tokens = batch.num_tokens
        longest = int(counts_B.max()) if counts_B.numel() else 0
        self.mask_BL = torch.arange(longest, device=mask_T.device) < counts_B[:, None]

    def matrix(self, values_T: Tensor) -> Tensor:
        """Return a (T,) column as a (B, L) matrix; 0 where a row has no token."""
        values_BL = torch.zeros(self.mask_BL.shape, dtype=values_T.dtype, device=values_T.device)
        values_BL[self._rows_N, self._columns_N] = values_T[self._places_N]
        return values_BL

    def column(self, values_BL: Tensor) -> Tensor:
        """Return a (B, L) matrix as a (T,) column; 0 on tokens that are not trained on."""
        values_T = torch.zeros(self._num_tokens, dtype=values_BL.dtype, device=values_BL.device)
        values_T[self._places_N] = values_BL[self._rows_N, self._columns_N]
        return values_T


def masked_whiten(values_T: Tensor, mask_T: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (T,) values with mean 0 and variance 1 where the mask holds, 0 elsewhere.

    Exactly 0 everywhere if all values are equal, or if there are fewer than two. `eps` is added to
    the unbiased variance.
    """
    values_N = values_T[mask_T]
    white_T = torch.zeros_like(values_T)
    if values_N.numel() < 2 or bool((values_N == values_N[0]).all()):
        return white_T
    white_T[mask_T] = (values_N - values_N.mean()) * (values_N.var() + eps).rsqrt()
    return white_T


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each group, (P,) float64 except `equal_P`; 0 for a group without samples.

    `std_P` is unbiased (n - 1), 0 for a single sample; `equal_P` is bool: no two scores differ.
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
    squares_P = zeros_P.index_add(0, group_index_B, (scores_B - mean_P[group_index_B]).square())
    variance_P = squares_P / (count_P - 1).clamp(min=1)
    lowest_P = zeros_P.scatter_reduce(0, group_index_B, scores_B, "amin", include_self=False)
    return GroupStatistics(
        count_P,
        mean_P,
        variance_P.sqrt(),
        lowest_P == zeros_P.scatter_reduce(0, group_index_B, scores_B, "amax", include_self=False),
    )
