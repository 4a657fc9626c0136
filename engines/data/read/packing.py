"""Cutting sequences into bins by token count: pure functions of the lengths.

`pack_by_budget` makes as few bins as it can under a token budget (micro-batches of one rank);
`partition_balanced` makes exactly k bins of nearly equal cost (shares of k ranks).
Promises: every index occurs exactly once; the result depends on the arguments alone, so every
rank that knows them computes the same bins. Does not promise an optimal packing: both
problems are NP-hard. First-fit decreasing needs at most 11/9 of the fewest bins, plus 6/9
(Dosa 2007).
"""

from collections.abc import Sequence

from engines.training.step.balance import balanced_partition


def pack_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: fill bins of at most `budget` tokens.

    Args:
        lengths: tokens of each sequence, at least 1.
        budget: most tokens of one bin.

    Returns:
        Bins of indices into `lengths`; ascending inside a bin, bins ordered by their first index.

    Raises:
        ValueError: a sequence is empty, or longer than the budget.
    """
    _check_lengths(lengths)
    bins: list[list[int]] = []
    first_fit = _FirstFit(len(lengths), budget)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > budget:
            raise ValueError(
                f"sequence {index} has {lengths[index]} tokens; the budget is {budget}"
            )
        slot = first_fit.place(lengths[index])
        if slot == len(bins):
            bins.append([])
        bins[slot].append(index)
    return sorted(sorted(members) for members in bins)


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


class _FirstFit:
    """The first bin with enough room, in O(log n): a maximum tree over the free room."""

    def __init__(self, max_bins: int, budget: int) -> None:
        self._num_leaves = 1
        while self._num_leaves < max(max_bins, 1):
            self._num_leaves *= 2
        self._room = [budget] * (2 * self._num_leaves)

    def place(self, length: int) -> int:
        """Take `length` from the first bin that has it; return that bin."""
        node = 1
        while node < self._num_leaves:
            node *= 2
            if self._room[node] < length:
                node += 1
        slot = node - self._num_leaves
        self._room[node] -= length
        while node > 1:
            node //= 2
            self._room[node] = max(self._room[2 * node], self._room[2 * node + 1])
        return slot


def _check_lengths(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}; need at least 1")
