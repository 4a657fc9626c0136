"""Curricula open what they say when they say it, lose no row, and depend on the step alone."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.data.order import Band, BandedOrder, ResumableOrder

_DIFFICULTY = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=25).map(tuple)


def ascending(difficulty: tuple[float, ...], batch_size: int, seed: int) -> ResumableOrder:
    return ResumableOrder(
        num_rows=len(difficulty), batch_size=batch_size, seed=seed, difficulty=difficulty
    )


def stream(order: ResumableOrder | BandedOrder, first: int, last: int) -> list[int]:
    return [row for step in range(first, last) for row in order.batch(step)]


@settings(max_examples=60)
@given(_DIFFICULTY, st.integers(1, 30), st.integers(0, 2**63))
def test_each_epoch_ascends_in_difficulty_and_visits_rows_once(
    difficulty: tuple[float, ...], batch_size: int, seed: int
) -> None:
    order = ascending(difficulty, batch_size, seed)
    rows = stream(order, 0, len(difficulty))
    for epoch in range(batch_size):
        chunk = rows[epoch * len(difficulty) : (epoch + 1) * len(difficulty)]
        assert Counter(chunk) == Counter(range(len(difficulty)))
        assert [difficulty[row] for row in chunk] == sorted(difficulty)


def test_equally_difficult_rows_are_reshuffled_each_epoch() -> None:
    order = ascending((1.0,) * 30 + (0.0,), 31, 0)
    first, second = order.batch(0), order.batch(1)
    assert first[0] == second[0] == 30
    assert first != second
    assert order.epoch(1) == 1.0
    other = ascending((1.0,) * 30 + (0.0,), 31, 1)
    assert other.batch(0) != first


def banded(batch_size: int, seed: int, difficulty: tuple[float, ...]) -> BandedOrder:
    bands = (Band(min(difficulty), 0), Band(min(difficulty) + 1.5, 4), Band(9.0, 6))
    return BandedOrder(difficulty=difficulty, bands=bands, batch_size=batch_size, seed=seed)


@settings(max_examples=60)
@given(_DIFFICULTY, st.integers(1, 12), st.integers(0, 2**63))
def test_band_opens_at_its_step_and_the_last_loses_no_row(
    difficulty: tuple[float, ...], batch_size: int, seed: int
) -> None:
    order = banded(batch_size, seed, difficulty)
    for first, last, limit in ((0, 4, 0.0), (4, 6, 1.5), (6, 6 + len(difficulty), 9.0)):
        rows = stream(order, first, last)
        pool = [row for row, each in enumerate(difficulty) if each <= min(difficulty) + limit]
        assert len(rows) == (last - first) * batch_size
        for start in range(0, len(rows) - len(pool) + 1, len(pool)):
            assert sorted(rows[start : start + len(pool)]) == pool
        assert set(rows) <= set(pool)
    assert set(rows) == set(range(len(difficulty)))


@settings(max_examples=40)
@given(_DIFFICULTY, st.integers(1, 12), st.integers(0, 2**63), st.integers(0, 9))
def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(
    difficulty: tuple[float, ...], batch_size: int, seed: int, step: int
) -> None:
    for walked, resumed in (
        (ascending(difficulty, batch_size, seed), ascending(difficulty, batch_size, seed)),
        (banded(batch_size, seed, difficulty), banded(batch_size, seed, difficulty)),
    ):
        batches = [walked.batch(i) for i in range(step + 1)]
        assert resumed.batch(step) == batches[step]


def test_the_orders_never_change() -> None:
    # Fixed numbers: a change here would silently change every recorded run.
    difficulty = (2.0, 0.0, 1.0, 0.0, 2.0, 1.0)
    assert ascending(difficulty, 6, 0).batch(0) == ASCENDING
    order = banded(3, 0, difficulty)
    assert [order.batch(0), order.batch(4), order.batch(6)] == BANDED


def test_refuses_impossible_fields() -> None:
    for difficulty, batch_size, seed in (((), 1, 0), ((1.0,), 0, 0), ((1.0,), 1, -1)):
        with pytest.raises(ValueError, match="need num_rows >= 1, batch_size >= 1, seed >= 0"):
            ascending(difficulty, batch_size, seed)
    for order in (
        ascending((1.0,), 1, 0),
        banded(1, 0, (1.0,)),
    ):
        with pytest.raises(ValueError, match="step: got -1"):
            order.batch(-1)


@pytest.mark.parametrize(
    ("bands", "words"),
    [
        ((), "need both to rise"),
        ((Band(1.0, 1),), "the steps from 0"),
        ((Band(1.0, 0), Band(3.0, 0)), "need both to rise"),
        ((Band(2.0, 0), Band(1.0, 5)), "need both to rise"),
        ((Band(0.5, 0), Band(3.0, 5)), "need a row in the first"),
        ((Band(1.0, 0), Band(2.5, 5)), "every row in the last"),
    ],
)
def test_refuses_bands_that_leave_rows_out(bands: tuple[Band, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BandedOrder(difficulty=(1.0, 3.0), bands=bands, batch_size=1, seed=0)


ASCENDING = [3, 1, 2, 5, 0, 4]
BANDED = [[1, 3, 1], [3, 2, 5], [2, 4, 0]]
