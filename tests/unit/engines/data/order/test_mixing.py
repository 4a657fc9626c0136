"""A mixture keeps its shares after every row, loses none, and is a pure function of the step."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.data.order import (
    MAX_PERIOD,
    MixedOrder,
    derived_seed,
    permutation,
    source_pattern,
    whole_parts,
)

_PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)


def mixed(num_rows: tuple[int, ...], weights: tuple[float, ...], **fields: int) -> MixedOrder:
    """Over sources that are stored one after another."""
    ends = [*accumulate(num_rows)]
    groups = tuple(tuple(range(end - rows, end)) for rows, end in zip(num_rows, ends, strict=True))
    return MixedOrder(groups=groups, weights=weights, **{"batch_size": 4, "seed": 0, **fields})


@pytest.mark.parametrize(
    ("parts", "pattern"),
    [
        ((1,), [0]),
        ((1, 1), [0, 1]),
        # Deadlines of source 0 in 4 places: 2, 3, 4; of source 1: 4.
        ((3, 1), [0, 0, 0, 1]),
        # Shares 1/2, 1/3, 1/6. Source 0 may come at 0, 2, 4 and must before 2, 4, 6; source 1 at
        # 0, 3 and before 3, 6; source 2 at 0 and before 6.
        ((3, 2, 1), [0, 1, 0, 1, 0, 2]),
    ],
)
def test_patterns_by_hand(parts: tuple[int, ...], pattern: list[int]) -> None:
    assert source_pattern(parts).tolist() == pattern


@settings(max_examples=60)
@given(_PARTS)
def test_each_prefix_keeps_source_shares_within_one_row(parts: tuple[int, ...]) -> None:
    pattern = source_pattern(parts).tolist()
    for source, part in enumerate(parts):
        given_rows = accumulate(each == source for each in pattern)
        for num_rows, count in enumerate(given_rows, start=1):
            exact = Fraction(part * num_rows, sum(parts))
            assert floor(exact) <= count <= ceil(exact)
    assert Counter(pattern) == dict(enumerate(parts))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 2**63),
)
def test_each_source_is_visited_in_successive_permutations(
    sources: list[tuple[int, int]], batch_size: int, seed: int
) -> None:
    num_rows = tuple(rows for rows, _ in sources)
    parts = whole_parts([part for _, part in sources])
    order = mixed(num_rows, parts, batch_size=batch_size, seed=seed)
    num_steps = 3 * max(num_rows) * sum(parts) // batch_size // min(parts) // 2 + 1
    stream = [row for step in range(num_steps) for row in order.batch(step)]
    first = 0
    for source, rows in enumerate(num_rows):
        own = [row - first for row in stream if first <= row < first + rows]
        expected = [
            row
            for epoch in range(len(own) // rows + 1)
            for row in permutation(rows, derived_seed(seed, source), epoch).tolist()
        ]
        assert own == expected[: len(own)]
        exact = Fraction(parts[source] * len(stream), sum(parts))
        assert floor(exact) <= len(own) <= ceil(exact)
        assert order.visited(num_steps)[source] == len(own)
        first += rows


@settings(max_examples=40)
@given(_PARTS, st.integers(1, 30), st.integers(0, 2**40), st.integers(0, 12))
def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(
    parts: tuple[int, ...], batch_size: int, seed: int, step: int
) -> None:
    num_rows = tuple(7 + part for part in parts)
    walked = mixed(num_rows, parts, batch_size=batch_size, seed=seed)
    batches = [walked.batch(i) for i in range(step + 1)]
    source_pattern.cache_clear()
    assert mixed(num_rows, parts, batch_size=batch_size, seed=seed).batch(step) == batches[step]
    # One batch of the whole is the stream of the small ones.
    whole = mixed(num_rows, parts, batch_size=batch_size * (step + 1), seed=seed).batch(0)
    assert whole == [row for batch in batches for row in batch]


def test_a_late_step_costs_no_walk_through_the_earlier_ones() -> None:
    order = mixed((1000, 10), (9, 1), batch_size=10, seed=3)
    assert order.visited(10**12) == (9 * 10**12, 10**12)
    batch = order.batch(10**12)
    assert sum(row < 1000 for row in batch) == 9


def test_the_order_never_changes() -> None:
    # Fixed numbers: a change here would silently change every recorded run.
    order = mixed((5, 3), (0.7, 0.3), batch_size=10)
    assert [order.batch(0), order.batch(1)] == GOLDEN
    assert derived_seed(0, 1) == SEED


def test_sources_of_one_size_and_seeds_are_visited_differently() -> None:
    order = mixed((50, 50), (1, 1), batch_size=100)
    rows = order.batch(0)
    first = [row for row in rows if row < 50]
    assert first != [row - 50 for row in rows if row >= 50]
    assert rows != mixed((50, 50), (1, 1), batch_size=100, seed=1).batch(0)


def test_weights_are_the_decimals_that_they_are_written_with() -> None:
    assert whole_parts([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_parts([7473, 12000]) == (2491, 4000)
    assert whole_parts([1e-1, 2]) == (1, 20)
    assert whole_parts([3.0]) == (1,)


def test_refuses_impossible_fields() -> None:
    for fields in ({"num_rows": ()}, {"num_rows": (0, 1)}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="num_rows >= 1, batch_size >= 1, seed >= 0"):
            mixed(**{"num_rows": (1, 1), "weights": (1, 1), **fields})
    with pytest.raises(ValueError, match="weights: got 1; need 2"):
        mixed((1, 1), (1,))
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="need finite numbers above 0"):
            mixed((1, 1), (1, weight))
    with pytest.raises(ValueError, match=f"need at most {MAX_PERIOD}; round them"):
        mixed((1, 1), (1 / 3, 0.5))
    with pytest.raises(ValueError, match="step: got -1"):
        mixed((1,), (1,)).batch(-1)


GOLDEN = [[0, 4, 7, 2, 3, 6, 1, 0, 4, 5], [3, 1, 7, 2, 3, 6, 0, 1, 2, 5]]
SEED = 16412783775159424549
