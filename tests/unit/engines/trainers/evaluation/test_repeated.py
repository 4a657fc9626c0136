"""Intervals where rows repeat problems: coverage, and the numbers of rows where none does."""

from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trainers.evaluation.accuracy import (
    bootstrap_interval,
    estimate,
    share_interval,
    sums_by_problem,
    wilson_interval,
)

EQUAL = np.full(30, 32)
UNEQUAL = np.rint(np.geomspace(1, 40, 60)).astype(int)


def test_sums_by_hand() -> None:
    found = sums_by_problem([("a", 1.0), ("b", 0.5), ("a", 0.0), ("a", 1.0)])
    assert (found.sums, found.num_rows) == ((2.0, 0.5), (3, 1))
    assert found.weighted_means == [2.0 * 2 / 4, 0.5 * 2 / 4]
    assert fmean(found.weighted_means) == fmean([1.0, 0.5, 0.0, 1.0])


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.sampled_from([0.8, 0.95]))
def test_interval_of_unrepeated_problems_is_exactly_wilson(
    verdicts: list[bool], confidence: float
) -> None:
    found = share_interval(sums_by_problem(enumerate(verdicts)), confidence)
    assert found == wilson_interval(sum(verdicts), len(verdicts), confidence)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(1, 7))
def test_bootstrap_of_equal_copies_matches_that_of_problems(
    values: list[float], num_copies: int
) -> None:
    rows = [(problem, value) for problem, value in enumerate(values) for _ in range(num_copies)]
    found = bootstrap_interval(sums_by_problem(rows), 0.9, 3, 50)
    assert found == pytest.approx(
        bootstrap_interval(sums_by_problem(enumerate(values)), 0.9, 3, 50)
    )


def test_copies_add_nothing_to_what_is_known() -> None:
    rows = [(problem, problem < 12) for problem in range(30) for _ in range(32)]
    assert share_interval(sums_by_problem(rows), 0.95) == pytest.approx(
        wilson_interval(12, 30, 0.95)
    )
    # 3 rows of one problem and 1 of another: (3 + 1)^2 / (9 + 1) = 1.6 verdicts.
    two = sums_by_problem([("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)])
    assert share_interval(two, 0.95) == pytest.approx(wilson_interval(1.2, 1.6, 0.95))


def verdicts(of: np.random.Generator, problems: np.ndarray) -> list[float]:
    """The same of every copy; right with a chance of 0.4."""
    return (of.random(problems[-1] + 1) < 0.4)[problems].astype(float).tolist()


def shares(of: np.random.Generator, problems: np.ndarray) -> list[float]:
    """Of 4 samples, drawn for each row: the chance of a problem is 0.4 in the mean."""
    chance = of.beta(2, 3, problems[-1] + 1)[problems]
    return (of.binomial(4, chance) / 4).tolist()


@pytest.mark.parametrize("num_rows", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("draw", [verdicts, shares])
def test_the_mean_is_covered_as_often_as_stated(
    draw: Callable[[np.random.Generator, np.ndarray], list[float]],
    num_rows: np.ndarray,
) -> None:
    of, num_times = np.random.default_rng(5), 500
    problems = np.repeat(np.arange(len(num_rows)), num_rows)
    num_covered = 0
    for seed in range(num_times):
        rows = [*zip(problems.tolist(), draw(of, problems), strict=True)]
        found = estimate(rows, 0.95, seed, 400)
        num_covered += found.low <= 0.4 <= found.high
    # Three deviations of the simulation, and what a bootstrap of few problems lacks.
    assert num_covered / num_times > 0.95 - 3 * (0.95 * 0.05 / num_times) ** 0.5 - 0.02


def test_no_row_has_no_interval() -> None:
    with pytest.raises(ValueError, match="no interval for 0 out of 0"):
        share_interval(sums_by_problem([]), 0.95)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_any_number_of_copies_of_one_problem_is_one_trial(share: float) -> None:
    """Rounding gives no more right answers than trials, and no trial less than one."""
    one = wilson_interval(share, 1, 0.95)
    for num_rows in range(1, 301):
        copies = sums_by_problem([("p", share)] * num_rows)
        assert share_interval(copies, 0.95) == pytest.approx(one, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60))
def test_whatever_repeats_has_an_interval_around_its_share(rows: list[tuple[int, bool]]) -> None:
    low, high = share_interval(sums_by_problem([(p, float(v)) for p, v in rows]), 0.95)
    assert 0 <= low <= sum(v for _, v in rows) / len(rows) <= high <= 1
