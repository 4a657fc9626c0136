"""pass@k and the Wilson interval against numbers from elsewhere."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trainers.evaluation.accuracy import pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 2, 1, 0.5),
        # Of the 6 pairs of 4 samples, only the one pair of wrong ones fails.
        (4, 2, 2, 5 / 6),
        # 10 triples of 5; with 2 right, one triple has none.
        (5, 2, 3, 9 / 10),
        # Too few wrong ones to fill a draw.
        (5, 3, 3, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(num_samples: int, num_correct: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(n: int, data) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(combinations(range(n), k))
    hits = sum(any(sample < correct for sample in draw) for draw in draws)
    assert pass_at_k(n, correct, k) == pytest.approx(float(Fraction(hits, len(draws))), abs=1e-12)


@given(st.integers(1, 60), st.data())
def test_pass_at_k_equals_the_product_form(n: int, data) -> None:
    """The numerically stable form of arXiv:2107.03374, figure 3."""
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    if n - correct < k:
        expected = 1.0
    else:
        expected = 1.0 - math.prod(1 - k / i for i in range(n - correct + 1, n + 1))
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_is_not_defined(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("num_correct", "num_problems", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_against_published_numbers(
    num_correct: int, num_problems: int, low: float, high: float
) -> None:
    found = wilson_interval(num_correct, num_problems, 0.95)
    assert found == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_bounds_are_where_the_score_test_just_rejects(n: int, data, confidence: float) -> None:
    """Definition instead of formula: |p_hat - p| = z sqrt(p (1 - p) / n) at both bounds."""
    correct = data.draw(st.sampled_from([0, n]) | st.integers(0, n))
    low, high = wilson_interval(correct, n, confidence)
    assert 0 <= low <= correct / n <= high <= 1
    z = {0.8: 1.2815515655446004, 0.95: 1.959963984540054, 0.99: 2.5758293035489004}[confidence]
    for bound in (low, high):
        distance = abs(correct / n - bound)
        assert distance == pytest.approx(z * math.sqrt(bound * (1 - bound) / n), abs=1e-8)


def test_wilson_interval_refuses_no_trials() -> None:
    with pytest.raises(ValueError, match="no interval"):
        wilson_interval(0, 0, 0.95)
