"""How often `paired_gain` calls a tie a win, over a thousand ties of every kind, and what it finds.

A test of level a may call at most a share a of the ties wins. 399 draws keep that exactly: of the
400 equally likely places of the observed sum, (1 - confidence) / 2 * 400 are above the margin.
"""

from collections.abc import Callable
from functools import cache
from math import comb

import numpy as np
import pytest

from engines.trainers.evaluation.accuracy import sums_by_problem
from engines.trainers.evaluation.comparison import paired_gain

NUM_TIES = 1_000
NUM_DRAWS = 399
CONFIDENCES = (0.9, 0.95, 0.99)
NOISE = 1e-4
"""Chance that a test of exactly the stated level leaves the limits, for one kind and level."""

Simulate = Callable[[np.random.Generator], np.ndarray]


def independent(of: np.random.Generator) -> np.ndarray:
    """Verdicts on 200 problems of differing difficulty, the same for both models."""
    chance = of.beta(2, 1, 200)
    return (of.random(200) < chance) * 1.0 - (of.random(200) < chance)


def agreeing(of: np.random.Generator) -> np.ndarray:
    """Verdicts that differ on 2 % of 500 problems, by a fair coin."""
    return of.choice([-1.0, 0.0, 1.0], 500, p=[0.01, 0.98, 0.01])


def few(of: np.random.Generator) -> np.ndarray:
    """Verdicts on 12 problems."""
    return (of.random(12) < 0.6) * 1.0 - (of.random(12) < 0.6)


def specialists(of: np.random.Generator) -> np.ndarray:
    """Each model is good at one half of 100 problems and bad at the other."""
    chance = np.repeat([0.9, 0.2], 50)
    return (of.random(100) < chance) * 1.0 - (of.random(100) < chance[::-1])


def continuous(of: np.random.Generator) -> np.ndarray:
    """Skewed scores of 30 problems with a scale of their own: no two differences are alike."""
    scale = of.exponential(1.0, 30)
    return scale * (of.exponential(1.0, 30) - of.exponential(1.0, 30))


def shares(of: np.random.Generator) -> np.ndarray:
    """Shares of 4 samples that are right, as pass@k gives them, on 60 problems."""
    chance = of.random(60)
    return (of.binomial(4, chance) - of.binomial(4, chance)) / 4


def copied(of: np.random.Generator) -> np.ndarray:
    """Greedy verdicts on 30 problems that stand there 32 times each, nearly always alike."""
    return of_copies(of, np.full(30, 32))


def copied_unequally(of: np.random.Generator) -> np.ndarray:
    """The same on 40 problems, of which a few stand there far more often than the others."""
    return of_copies(of, np.rint(np.geomspace(1, 200, 40)).astype(int))


def of_copies(of: np.random.Generator, num_rows: np.ndarray) -> np.ndarray:
    """Of each problem one verdict, and another on one row of a hundred; one number per problem."""
    problems = np.repeat(np.arange(len(num_rows)), num_rows)

    def verdicts() -> np.ndarray:
        right = (of.random(len(num_rows)) < 0.6)[problems]
        return right ^ (of.random(len(problems)) < 0.01)

    differences = verdicts() * 1.0 - verdicts()
    rows = zip(problems.tolist(), differences.tolist(), strict=True)
    found = np.array(sums_by_problem(rows).weighted_means)
    assert found.mean() == pytest.approx(differences.mean())
    return found


def binomial_cdf(most: int, num_trials: int, chance: float) -> float:
    return sum(
        comb(num_trials, hits) * chance**hits * (1 - chance) ** (num_trials - hits)
        for hits in range(most + 1)
    )


@cache
def most_wins(level: float) -> int:
    """Wins among the ties that a test of this level exceeds with a chance of at most `NOISE`."""
    return next(most for most in range(NUM_TIES) if binomial_cdf(most, NUM_TIES, level) > 1 - NOISE)


@cache
def fewest_wins(level: float) -> int:
    return next(most for most in range(NUM_TIES) if binomial_cdf(most, NUM_TIES, level) > NOISE)


@cache
def num_wins(
    simulate: Simulate,
    confidence: float,
    num_pairs: int = NUM_TIES,
    num_draws: int = NUM_DRAWS,
) -> int:
    of = np.random.default_rng(20)
    gains = [
        paired_gain(simulate(of).tolist(), confidence, seed, num_draws) for seed in range(num_pairs)
    ]
    return sum(gain.mean > gain.margin for gain in gains)


def test_the_limits_by_hand() -> None:
    # A binomial of 1,000 trials and 0.025 has mean 25 and standard deviation 4.94; 1e-4 lies
    # about 3.9 deviations out on the side of its tail, 3.5 on the other.
    assert 25 + 3.5 * 4.94 < most_wins(0.025) < 25 + 4.2 * 4.94
    assert 25 - 4 * 4.94 < fewest_wins(0.025) < 25 - 3 * 4.94


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize(
    "simulate",
    [independent, agreeing, few, specialists, continuous, shares, copied, copied_unequally],
)
def test_ties_are_called_wins_no_more_often_than_stated(
    simulate: Simulate, confidence: float
) -> None:
    assert num_wins(simulate, confidence) <= most_wins((1 - confidence) / 2)


@pytest.mark.parametrize("confidence", CONFIDENCES)
def test_win_rate_reaches_the_stated_level_without_equal_sums(
    confidence: float,
) -> None:
    """A comparison that never finds anything would keep every level."""
    assert num_wins(continuous, confidence) >= fewest_wins((1 - confidence) / 2)


def mcnemar_power(num_problems: int, won: float, lost: float, level: float) -> float:
    """Chance that the exact sign test of the changed problems finds the better model.

    Args:
        num_problems: that both answer.
        won: chance that a problem goes from wrong to right.
        lost: the other way.
        level: one-sided.
    """
    power = 0.0
    for changed in range(num_problems + 1):
        many = comb(num_problems, changed) * (won + lost) ** changed
        many *= (1 - won - lost) ** (num_problems - changed)
        if many > 1e-9:
            needed = changed + 1
            while 1 - binomial_cdf(needed - 2, changed, 0.5) <= level:
                needed -= 1
            power += many * (1 - binomial_cdf(needed - 1, changed, won / (won + lost)))
    return power


@pytest.mark.parametrize(
    ("won", "lost", "confidence"),
    [(0.10, 0.03, 0.95), (0.10, 0.03, 0.99), (0.05, 0.02, 0.9)],
)
def test_a_better_model_is_found_as_often_as_by_the_exact_test(
    won: float, lost: float, confidence: float
) -> None:
    def better(of: np.random.Generator) -> np.ndarray:
        return of.choice([-1.0, 0.0, 1.0], 200, p=[lost, 1 - won - lost, won])

    power = mcnemar_power(200, won, lost, (1 - confidence) / 2)
    found = num_wins(better, confidence, 500, 1_999) / 500
    # Four deviations of the simulation, and what 1,999 draws blur of a step of the exact test.
    assert abs(found - power) < 4 * (power * (1 - power) / 500) ** 0.5 + 0.02
    assert found > 0.3


def test_a_better_model_is_found_among_copies() -> None:
    def better(of: np.random.Generator) -> np.ndarray:
        rows = np.repeat((of.random(30) < 0.8) * 1.0 - (of.random(30) < 0.3), 32)
        problems = np.arange(960) // 32
        return np.array(sums_by_problem(zip(problems, rows, strict=True)).weighted_means)

    # 0.5 is 4.2 standard errors of 30 problems.
    assert num_wins(better, 0.95, 200) > 180


def test_a_clearly_better_model_is_nearly_always_found() -> None:
    def better(of: np.random.Generator) -> np.ndarray:
        chance = of.uniform(0.3, 0.8, 400)
        return (of.random(400) < chance + 0.2) * 1.0 - (of.random(400) < chance)

    # 0.2 is six standard errors: 400 problems, of which a half change.
    assert num_wins(better, 0.99, 200) > 195


def test_a_better_score_of_small_steps_is_found() -> None:
    def better(of: np.random.Generator) -> np.ndarray:
        return of.normal(0.08, 0.2, 100)

    # 4 standard errors, 2.04 above the margin at 1.96: 98 % are found.
    assert num_wins(better, 0.95, 100) > 90
