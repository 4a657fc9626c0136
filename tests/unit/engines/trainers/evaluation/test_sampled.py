"""Intervals against simulated coverage and hand numbers, and metrics over problems."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.trainers.evaluation.accuracy import (
    Estimate,
    ProblemSums,
    SampledAnswer,
    bootstrap_interval,
    estimate,
    sampled_metrics,
    sampled_values,
    sums_by_problem,
    wilson_interval,
)

GOLDEN = (0.16, 1.06)


def once(values: Sequence[float]) -> ProblemSums:
    """Of problems that stand there once each."""
    return sums_by_problem(enumerate(values))


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_bootstrap_covers_the_mean_as_often_as_stated(confidence: float) -> None:
    """Means of 4 verdicts on 80 problems, whose true mean is known; 400 repetitions."""
    of = np.random.default_rng(11)
    num_covered = 0
    for seed in range(400):
        values = of.binomial(4, of.beta(2, 3, 80)) / 4
        low, high = bootstrap_interval(once(values.tolist()), confidence, seed, 400)
        num_covered += low <= 2 / 5 <= high
    # A percentile interval of 80 values is known to be a little narrow: about 1 %.
    deviation = (confidence * (1 - confidence) / 400) ** 0.5
    assert abs(num_covered / 400 - (confidence - 0.01)) < 3.5 * deviation


def test_a_bootstrap_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(5).normal(3, 2, 500)
    low, high = bootstrap_interval(once(values.tolist()), 0.95, 0, 4000)
    width = 2 * 1.959964 * values.std() / 500**0.5
    assert high - low == pytest.approx(width, rel=0.08)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * width)


def test_a_small_bootstrap_by_hand() -> None:
    # 0 and 1: means 0, 1/2 and 1 with chances 1/4, 1/2 and 1/4.
    assert bootstrap_interval(once([0.0, 1.0]), 0.4, 0) == (0.5, 0.5)
    assert bootstrap_interval(once([0.0, 1.0]), 0.6, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="got no values"):
        bootstrap_interval(once([]), 0.95, 0)


def test_the_draws_never_change() -> None:
    # Fixed numbers: a change here would silently change every recorded interval.
    assert bootstrap_interval(once([0.0, 0.1, 0.3, 0.7, 1.5]), 0.9, 7, 50) == pytest.approx(GOLDEN)


@settings(max_examples=40)
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=20),
    st.integers(0, 2**64),
    st.sampled_from([0.5, 0.9, 0.99]),
)
def test_a_bootstrap_repeats_and_holds_its_mean(
    values: list[float], seed: int, confidence: float
) -> None:
    low, high = bootstrap_interval(once(values), confidence, seed, 60)
    assert (low, high) == bootstrap_interval(once(values), confidence, seed, 60)
    assert min(values) - 1e-12 <= low <= fmean(values) <= high <= max(values) + 1e-12


def test_verdicts_get_wilson_interval_and_other_values_bootstrap() -> None:
    low, high = wilson_interval(3, 4, 0.95)
    assert estimate([*enumerate([1.0, 1.0, 0.0, 1.0])], 0.95, 0) == Estimate(0.75, low, high, 4)
    values = [1.0, 0.5, 0.0, 1.0]
    low, high = bootstrap_interval(once(values), 0.95, 3)
    assert estimate([*enumerate(values)], 0.95, 3) == Estimate(0.625, low, high, 4)


def samples(*each: tuple[str | None, bool, float]) -> list[SampledAnswer]:
    return [SampledAnswer(*sample) for sample in each]


def test_metrics_over_problems() -> None:
    problems = [
        ("a", samples(("1", True, 1.0), ("2", False, 0.2))),
        ("b", samples(("", False, 0.0))),
        ("c", []),
    ]
    found = sampled_metrics(problems, (2, 1), 0.95, 0)
    assert {name: (each.mean, each.num_problems) for name, each in found.items()} == {
        "avg@1": (0.25, 2),
        "avg@2": (0.5, 1),
        "best@1": (pytest.approx(0.3), 2),
        "best@2": (1.0, 1),
        "maj@1": (0.25, 2),
        # One vote for each of two answers.
        "maj@2": (0.5, 1),
        "pass@1": (0.25, 2),
        "pass@2": (1.0, 1),
    }
    assert list(found) == sorted(found)
    assert all(each.low <= each.mean <= each.high for each in found.values())
    assert (found["pass@2"].low, found["pass@2"].high) == wilson_interval(1, 1, 0.95)
    assert sampled_metrics([], (1,), 0.95, 0) == {}


def test_empty_answer_casts_no_vote_and_none_removes_maj_at_k() -> None:
    found = sampled_metrics([("a", samples(("1", True, 1.0), ("", False, 0.0)))], (2,), 0.95, 0)
    assert found["maj@2"].mean == 1.0, "one vote of two samples"
    unsaid = samples((None, True, 1.0), ("2", False, 0.0))
    said = samples(("1", True, 1.0), ("1", True, 1.0))
    found = sampled_metrics([("a", said), ("b", unsaid)], (1, 2), 0.95, 0)
    assert {name for name in found if name.startswith("maj@")} == set()
    assert found["avg@2"].mean == 0.75
    assert "maj@2" in sampled_values(said, 2)
    assert "maj@2" not in sampled_values(unsaid, 2)
