"""Cutting sequences into shares by token count: pure functions of the lengths.

Promises: every index occurs exactly once; the result depends on the arguments alone, so every
rank that knows them computes the same shares. Does not promise the best split: the problem is
NP-hard.
"""

from collections.abc import Sequence

from engines.training.step.balance import balanced_partition


def partition_balanced(
    lengths: Sequence[int], num_bins: int, *, costs: Sequence[float] | None = None
) -> list[list[int]]:
    """Split into exactly `num_bins` bins of nearly equal cost; see `balanced_partition`.

    Args:
        lengths: tokens of each sequence, at least 1.
        num_bins: number of bins, at least 1. With at least as many sequences no bin is empty.
        costs: of each sequence, in any unit; None balances tokens.

    Returns:
        `num_bins` lists of ascending indices; bins ordered by their first index, empty ones last.

    Raises:
        ValueError: a sequence is empty, a cost is negative, or `num_bins` is below 1.
    """
    _check_lengths(lengths)
    if num_bins < 1:
        raise ValueError(f"num_bins: got {num_bins}; need at least 1")
    return balanced_partition(lengths if costs is None else costs, num_bins, sizes=lengths)


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}; need at least 1")
