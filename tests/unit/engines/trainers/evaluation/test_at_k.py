"""Votes and bests against listed draws, other formulas and simulated draws."""

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trainers.evaluation.accuracy import best_at_k, maj_at_k, pass_at_k


def listed_majority(answers: list[str | None], correct: list[bool], k: int) -> Fraction:
    """The definition: every draw is listed, its votes are counted, ties share."""
    worth = {
        answer: Fraction(sum(c for a, c in zip(answers, correct, strict=True) if a == answer))
        / answers.count(answer)
        for answer in answers
    }
    total, num_draws = Fraction(0), 0
    for draw in combinations(answers, k):
        num_draws += 1
        votes = Counter(answer for answer in draw if answer is not None)
        tied = [answer for answer in votes if votes[answer] == max(votes.values())]
        total += sum((worth[answer] for answer in tied), Fraction(0)) / max(1, len(tied))
    return total / num_draws


@pytest.mark.parametrize(
    ("answers", "right", "k", "expected"),
    [
        # One vote: the share of samples that are right.
        ("aab", "a", 1, 2 / 3),
        # Pairs: aa is right, two of ab tie.
        ("aab", "a", 2, (1 + 0.5 + 0.5) / 3),
        ("aab", "a", 3, 1.0),
        ("aab", "b", 3, 0.0),
        # Three answers tie.
        ("abc", "b", 3, 1 / 3),
        # Of the 10 triples of aabbc: aab, aab, aac win with a; abb, abb, bbc with b; 4 times abc.
        ("aabbc", "a", 3, (3 + 4 / 3) / 10),
        # A dot has no answer: of the 6 pairs of aa.. one holds none and is wrong.
        ("aa..", "a", 2, 5 / 6),
        ("...", "", 2, 0.0),
        # One vote beats two samples without an answer.
        ("a..", "a", 3, 1.0),
    ],
)
def test_majorities_by_hand(answers: str, right: str, k: int, expected: float) -> None:
    votes = [None if answer == "." else answer for answer in answers]
    correct = [answer == right for answer in answers]
    assert maj_at_k(votes, correct, k) == pytest.approx(expected, abs=1e-12)


_SAMPLES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=9
)


@given(_SAMPLES, st.data())
def test_a_majority_is_the_mean_over_all_listed_draws(samples, data) -> None:
    answers, correct = [a for a, _ in samples], [c for _, c in samples]
    k = data.draw(st.integers(1, len(samples)))
    expected = float(listed_majority(answers, correct, k))
    assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 12), st.integers(0, 12), st.data())
def test_a_vote_between_two_answers_is_a_hypergeometric_tail(wrong: int, right: int, data) -> None:
    """Counted another way: the right one wins with more than half, and shares a half."""
    n = wrong + right
    k = data.draw(st.integers(1, n))
    ways = sum(
        comb(right, hits) * comb(wrong, k - hits) * (2 if 2 * hits > k else 1)
        for hits in range(k + 1)
        if 2 * hits >= k
    )
    answers: list[str | None] = ["no"] * wrong + ["yes"] * right
    found = maj_at_k(answers, [answer == "yes" for answer in answers], k)
    assert found == pytest.approx(ways / (2 * comb(n, k)), abs=1e-12)


def test_many_samples_agree_with_simulated_draws() -> None:
    of = np.random.default_rng(3)
    labels = of.choice(6, 100, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    draws = [np.bincount(of.choice(labels, 20, replace=False), minlength=6) for _ in range(4000)]
    shares = [(votes[1] == votes.max()) / np.sum(votes == votes.max()) for votes in draws]
    answers: list[str | None] = [str(label) for label in labels]
    found = maj_at_k(answers, [label == 1 for label in labels], 20)
    assert abs(found - fmean(shares)) < 4 * np.std(shares) / 4000**0.5


def test_answers_that_all_differ_are_folded_in_a_step_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is drawn ties with one vote each, so a draw is worth its share of right answers."""
    folds = list[int]()
    plain = np.convolve

    def counted(*arrays: np.ndarray) -> np.ndarray:
        folds.append(1)
        return plain(*arrays)

    monkeypatch.setattr(np, "convolve", counted)
    answers: list[str | None] = [str(place) for place in range(256)]
    found = maj_at_k(answers, [place % 3 == 0 for place in range(256)], 128)
    assert found == pytest.approx(86 / 256, abs=1e-12)
    assert len(folds) < 256


def test_more_samples_than_a_float_can_count_draws_of() -> None:
    answers: list[str | None] = ["a"] * 900 + ["b"] * 700
    correct = [answer == "a" for answer in answers]
    assert maj_at_k(answers, correct, 1) == pytest.approx(9 / 16)
    assert maj_at_k(answers, correct, 3) == pytest.approx(
        (9 / 16) ** 3 + 3 * (9 / 16) ** 2 * (7 / 16), abs=1e-3
    )


@given(_SAMPLES, st.randoms())
def test_maj_at_k_is_in_range_and_ignores_sample_order(samples, random) -> None:
    shuffled = random.sample(samples, len(samples))
    for k in {1, len(samples)}:
        found = maj_at_k([a for a, _ in samples], [c for _, c in samples], k)
        again = maj_at_k([a for a, _ in shuffled], [c for _, c in shuffled], k)
        assert found == pytest.approx(again, abs=1e-12)
        assert 0 <= found <= 1


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ([1.0, 3.0, 2.0], 1, 2.0),
        # Pairs of 1, 2, 3: 2, 3, 3.
        ([1.0, 3.0, 2.0], 2, 8 / 3),
        ([1.0, 3.0, 2.0], 3, 3.0),
        ([-1.0, -1.0], 2, -1.0),
    ],
)
def test_bests_by_hand(scores: list[float], k: int, expected: float) -> None:
    assert best_at_k(scores, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.data())
def test_a_best_is_the_mean_over_all_listed_draws(scores: list[float], data) -> None:
    k = data.draw(st.integers(1, len(scores)))
    expected = fmean(max(draw) for draw in combinations(scores, k))
    assert best_at_k(scores, k) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_the_best_verdict_is_pass_at_k(verdicts: list[bool], data) -> None:
    k = data.draw(st.integers(1, len(verdicts)))
    expected = pass_at_k(len(verdicts), sum(verdicts), k)
    assert best_at_k(verdicts, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
def test_refuses_what_is_not_defined(k: int) -> None:
    with pytest.raises(ValueError, match=rf"maj@{k} of 2 answers .* not defined"):
        maj_at_k(["a", "b"], [True, False], k)
    with pytest.raises(ValueError, match=rf"best@{k} of 2 scores is not defined"):
        best_at_k([1.0, 2.0], k)
    with pytest.raises(ValueError, match="with 1 verdicts"):
        maj_at_k(["a", "b"], [True], 1)
