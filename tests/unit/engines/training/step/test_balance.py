"""Balanced partitions: hand-worked differencing, exhaustive optima, and properties."""

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.training.step.balance import balanced_partition, fewest_parts

costs_strategy = st.lists(st.integers(0, 60), max_size=40)
sized = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=30)


def sums(costs: Sequence[float], parts: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def greedy_largest(costs: Sequence[float], num_parts: int) -> float:
    """Costliest part of longest-processing-time-first, written on its own."""
    loads = [0.0] * num_parts
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def best_largest(costs: Sequence[float], num_parts: int) -> float:
    """The optimum, by trying every assignment."""
    return min(
        max(
            sum(c for c, p in zip(costs, places, strict=True) if p == part)
            for part in range(num_parts)
        )
        for places in product(range(num_parts), repeat=len(costs))
    )


def test_differencing_then_a_swap_worked_by_hand() -> None:
    # Differencing: (8 | 7) spread 1; (6 | 5) spread 1; 4 on the 7: (7 4 | 8) spread 3; that with
    # (6 | 5): {7 4 5} 16 against {8 6} 14. Swapping the 7 for the 6 makes both 15, the optimum.
    parts = balanced_partition([8, 7, 6, 5, 4], 2)
    assert parts == [[0, 1], [2, 3, 4]]


def test_three_parts_worked_by_hand() -> None:
    # (9 | 7 | -) spread 9; with the 6 (9 | 7 | 6) spread 3; (5 | 4 | -) spread 5; with the 3
    # (5 | 4 | 3)... spread 3 stands before 2: last 9 + 3, 7 + 4, 6 + 5, so 12 11 11.
    parts = balanced_partition([9, 7, 6, 5, 4, 3], 3)
    assert parts == [[0, 5], [1, 4], [2, 3]]


def test_differencing_beats_greedy_where_it_is_known_to() -> None:
    # Greedy: 8 | 7, 6 on the 7, 5 on the 8, 4 on either 13: 17 against 13.
    assert greedy_largest([8, 7, 6, 5, 4], 2) == 17
    assert max(sums([8, 7, 6, 5, 4], balanced_partition([8, 7, 6, 5, 4], 2))) == 15


@given(costs_strategy, st.integers(1, 8))
def test_every_item_once_in_exactly_k_parts(costs: list[int], num_parts: int) -> None:
    parts = balanced_partition(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert sum(1 for part in parts if part) == min(num_parts, len(costs))
    assert all(part == sorted(part) for part in parts)
    assert parts == sorted(parts, key=lambda part: (not part, part))
    assert parts == balanced_partition(list(costs), num_parts)


@given(costs_strategy, st.integers(1, 8))
def test_partition_is_no_worse_than_greedy_with_bounded_spread(
    costs: list[int], num_parts: int
) -> None:
    loads = sums(costs, balanced_partition(costs, num_parts))
    assert max(loads) <= greedy_largest(costs, num_parts)
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(2, 3))
def test_near_the_optimum(costs: list[int], num_parts: int) -> None:
    largest = max(sums(costs, balanced_partition(costs, num_parts)))
    # Greedy's bound 4/3 - 1/(3k) (Graham 1969) holds for us too.
    bound = 4 / 3 - 1 / (3 * num_parts)
    assert largest <= bound * best_largest(costs, num_parts) + 1e-9


@given(costs_strategy, st.integers(2, 6))
def test_no_single_move_or_swap_would_help(costs: list[int], num_parts: int) -> None:
    parts = balanced_partition(costs, num_parts)
    loads = sums(costs, parts)
    heavy = max(range(num_parts), key=lambda p: loads[p])
    if loads[heavy] <= sum(costs) / num_parts * 1.0001:
        return
    if sum(1 for load in loads if load == loads[heavy]) > 1:
        return  # the search relieves one of them at a time
    for light in set(range(num_parts)) - {heavy}:
        for given_item in parts[heavy] if len(parts[heavy]) > 1 else []:
            for taken in (0, *(costs[i] for i in parts[light])):
                moved = costs[given_item] - taken
                assert not 0 < moved < loads[heavy] - loads[light]


@given(sized, st.integers(1, 6), st.randoms(use_true_random=False))
def test_reordering_the_items_reorders_only_equal_ones(
    items: list[tuple[int, int]], more: int, shuffle: random.Random
) -> None:
    def contents(items: list[tuple[int, int]]) -> Counter[tuple[tuple[int, int], ...]]:
        sizes = [size for _, size in items]
        parts = balanced_partition(
            [cost for cost, _ in items],
            fewest_parts(sizes, 40) + more,
            sizes=sizes,
            max_size=40,
        )
        return Counter(tuple(sorted(items[i] for i in part)) for part in parts)

    shuffled = list(items)
    shuffle.shuffle(shuffled)
    assert contents(items) == contents(shuffled)


@given(sized, st.integers(1, 50), st.integers(0, 5))
def test_the_cap_holds(items: list[tuple[int, int]], max_size: int, more: int) -> None:
    costs, sizes = [cost for cost, _ in items], [size for _, size in items]
    num_parts = fewest_parts(sizes, max_size) + more
    parts = balanced_partition(costs, num_parts, sizes=sizes, max_size=max_size)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert sum(1 for part in parts if part) == min(num_parts, len(costs))
    for part in parts:
        assert sum(sizes[i] for i in part) <= max_size or len(part) == 1


def test_a_tight_cap_that_equal_costs_would_break() -> None:
    # By cost alone: the dear item against the three cheap ones, of 12 > 9 tokens.
    costs, sizes = [30, 10, 10, 10], [4, 4, 4, 4]
    assert balanced_partition(costs, 2) == [[0], [1, 2, 3]]
    parts = balanced_partition(costs, 2, sizes=sizes, max_size=9)
    assert sums(sizes, parts) == [8, 8]


def test_fewest_parts_worked_by_hand() -> None:
    assert fewest_parts([4, 7, 3, 5, 1], 10) == 2  # 7+3, 5+4+1
    assert fewest_parts([6, 6, 6], 10) == 3
    assert fewest_parts([25, 3, 11, 4], 10) == 3  # 25 and 11 alone, 4+3
    assert fewest_parts([], 10) == 0


def test_an_item_above_the_cap_stands_alone() -> None:
    parts = balanced_partition([1, 1, 1], 2, sizes=[50, 1, 1], max_size=10)
    assert parts == [[0], [1, 2]]
    assert balanced_partition([5], 3, sizes=[50], max_size=10) == [[0], [], []]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts: got 0"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match=r"found no partition under max_size 10; 3 parts are"):
        balanced_partition([1, 1, 1], 2, sizes=[6, 6, 6], max_size=10)
    with pytest.raises(ValueError, match="3 parts are enough"):
        balanced_partition([1, 1, 1], 1, sizes=[60, 60, 6], max_size=10)
    with pytest.raises(ValueError, match="a cap without sizes"):
        balanced_partition([1], 1, max_size=10)
    with pytest.raises(ValueError, match="need one for each of 2 costs"):
        balanced_partition([1, 2], 1, sizes=[1])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="costs: item 1 has"):
            balanced_partition([1, bad], 1)
    assert balanced_partition([], 2) == [[], []]
    assert balanced_partition([0, 0, 0], 2) in ([[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]])


def test_a_long_tail_is_balanced_to_a_thousandth() -> None:
    draw = random.Random(0)
    lengths = [min(4096, int(draw.lognormvariate(5, 1)) + 8) for _ in range(512)]
    costs = [20_000 * n + 8 * n * n for n in lengths]
    loads = sums(costs, balanced_partition(costs, 8, sizes=lengths, max_size=sum(lengths) // 7))
    assert max(loads) <= 1.001 * sum(costs) / 8
