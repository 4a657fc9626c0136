"""Packers: hand-worked cases, brute force on small ones, properties on the rest."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.data.read.packing import partition_balanced

lengths = st.lists(st.integers(1, 60), max_size=40)


def test_partition_worked_by_hand() -> None:
    # Differencing alone ends at 16 against 14; one swap makes both 15.
    bins = partition_balanced([8, 7, 6, 5, 4], 2)
    assert [sum([8, 7, 6, 5, 4][i] for i in members) for members in bins] == [15, 15]


def test_partition_of_costs() -> None:
    # By tokens 10 against 10; quadratically the 6 alone costs what all the others do: 36.
    sizes = [6, 4, 2, 2, 2, 2, 2]
    bins = partition_balanced(sizes, 2)
    assert [sum(sizes[i] for i in members) for members in bins] == [10, 10]
    bins = partition_balanced(sizes, 2, costs=[n * n for n in sizes])
    assert bins == [[0], [1, 2, 3, 4, 5, 6]]
    with pytest.raises(ValueError, match="costs: item 0 has -1"):
        partition_balanced([1], 1, costs=[-1])


@given(lengths, st.integers(1, 8))
def test_partition_holds_every_sequence_once_in_exactly_k_bins(sizes: list[int], k: int) -> None:
    bins = partition_balanced(sizes, k)
    assert len(bins) == k
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    assert sum(1 for members in bins if members) == min(k, len(sizes))
    loads = [sum(sizes[index] for index in members) for members in bins]
    # Differencing never leaves a spread above the largest item.
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_partition_is_near_the_best_split_in_two(sizes: list[int]) -> None:
    total = sum(sizes)
    best = min(
        max(load, total - load)
        for picks in product((0, 1), repeat=len(sizes))
        for load in [sum(s for s, pick in zip(sizes, picks, strict=True) if pick)]
    )
    worst = max(sum(sizes[i] for i in members) for members in partition_balanced(sizes, 2))
    assert worst <= 7 / 6 * best + 1e-9  # Fischetti & Martello 1987, for two bins


def test_partition_refuses_no_bins_and_empty_sequences() -> None:
    with pytest.raises(ValueError, match="num_bins: got 0"):
        partition_balanced([1], 0)
    with pytest.raises(ValueError, match="sequence 0 has length 0"):
        partition_balanced([0], 1)
