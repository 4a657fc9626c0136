"""pass@k and the Wilson interval of a share; imports no torch.

Majority vote and best score of k of a problem's n samples; imports no torch.

Every value is the exact mean over all draws of k without replacement; verl draws 1,000 times with
replacement, which favours repetition.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import comb, sqrt
from statistics import NormalDist, fmean

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k samples is right.

    arXiv:2107.03374 eq. 1: ``1 - C(n - c, k) / C(n, k)`` with n `num_samples`, c `num_correct`.
    Raises `ValueError` if k is not in [1, n], or c is not in [0, n].
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} right out of {num_samples} is not defined")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def wilson_interval(
    num_correct: float, num_problems: float, confidence: float
) -> tuple[float, float]:
    """Return the score interval of a binomial share (Wilson 1927), without continuity correction.

    It stays inside [0, 1] and is right near 0 and 1. A tie may count half; `num_problems` may be an
    effective number. Raises `ValueError` if there are no trials, or more successes than trials.
    """
    if num_problems < 1 or not 0 <= num_correct <= num_problems:
        raise ValueError(f"no interval for {num_correct:g} out of {num_problems:g}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_correct / num_problems
    spread = z * sqrt(share * (1 - share) / num_problems + z * z / (4 * num_problems**2))
    scale = 1 + z * z / num_problems
    centre = share + z * z / (2 * num_problems)
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(share, low)), min(1.0, max(share, high))


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the probability that the majority of k of a problem's n samples is right.

    Self-consistency, arXiv:2203.11171 sec. 2. Answers that tie share the draw evenly. A sample
    without an answer casts no vote; a draw without any vote is wrong. Equal answers with different
    verdicts count as their mean. The caller normalises `answers`.

    Counts in a draw without replacement are distributed as independent binomials given their sum.
    For each winning number of votes, the answers that can reach it are folded in one by one, and
    the others at once: about n^2 k^2 small steps at most, without listing draws.

    Raises `ValueError` if k is not in [1, n], or there are not as many verdicts as answers.
    """
    if not 1 <= k <= len(answers) or len(correct) != len(answers):
        raise ValueError(
            f"maj@{k} of {len(answers)} answers with {len(correct)} verdicts is not defined"
        )
    verdicts: defaultdict[str, list[bool]] = defaultdict(list)
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None:
            verdicts[answer].append(verdict)
    classes = [(len(each), fmean(each)) for each in verdicts.values()]
    most = min(k, max((count for count, _ in classes), default=0))
    right = sum(_right_with(votes, classes, len(answers), k) for votes in range(1, most + 1))
    return min(1.0, max(0.0, right / _chance(len(answers), k, len(answers), k)))


def _right_with(votes: int, classes: Sequence[tuple[int, float]], n: int, k: int) -> float:
    """Return the probability that a right winner has `votes` votes, times that of k samples.

    `classes` holds the number of samples and the mean verdict of each answer.
    """
    rivals = [(count, value) for count, value in classes if count >= votes]
    num_others = n - sum(count for count, _ in rivals)
    # (ties, drawn): chance, and chance times the sum of the tied answers' verdicts.
    chances = np.zeros((min(k // votes, len(rivals)) + 1, k + 1))
    worths = np.zeros_like(chances)
    chances[0] = _chances(num_others, n, k)
    for count, value in rivals:
        below, wins = _chances(count, n, k)[:votes], _chances(count, n, k)[votes]
        tied = _shifted(chances, votes) * wins
        tied_worths = _shifted(worths, votes) * wins + value * tied
        chances = _folded(chances, below) + tied
        worths = _folded(worths, below) + tied_worths
    return sum(worths[ties, k] / ties for ties in range(1, len(worths)))


def _folded(table: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Convolve each row with the probabilities of a count, cut to the table's width."""
    width = table.shape[1]
    if len(chances) < len(table):
        # Many ties of few votes each: loop over the number drawn, with all rows at once.
        folded = np.zeros_like(table)
        for drawn, chance in enumerate(chances):
            folded[:, drawn:] += chance * table[:, : width - drawn]
        return folded
    return np.stack([np.convolve(row, chances)[:width] for row in table])


def _shifted(table: np.ndarray, votes: int) -> np.ndarray:
    """Shift the table by one tie and by `votes` drawn samples."""
    moved = np.zeros_like(table)
    moved[1:, votes:] = table[:-1, : table.shape[1] - votes]
    return moved


@lru_cache(maxsize=256)
def _chances(count: int, n: int, k: int) -> np.ndarray:
    """Return (k + 1,) `_chance` by number drawn; cached, as answers of one count share it."""
    chances = np.array([_chance(count, drawn, n, k) for drawn in range(k + 1)])
    chances.setflags(write=False)
    return chances


def _chance(count: int, drawn: int, n: int, k: int) -> float:
    """Return the probability that `drawn` of `count` samples are drawn, each with k/n."""
    return comb(count, drawn) * k**drawn * (n - k) ** max(0, count - drawn) / n**count


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the mean of the largest of k scores over all draws without replacement.

    The i-th smallest of n is the largest of ``C(i - 1, k - 1)`` of the ``C(n, k)`` draws. Of
    verdicts it is pass@k. Raises `ValueError` if k is not in [1, n].
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"best@{k} of {len(scores)} scores is not defined")
    ascending = sorted(scores)
    draws = comb(len(scores), k)
    return sum(
        score * (comb(place, k - 1) / draws)
        for place, score in enumerate(ascending)
        if place >= k - 1
    )
