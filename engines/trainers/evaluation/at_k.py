"""What k of a problem's n samples are worth: a majority vote, the best.

Promises: every value is the exact mean over all draws of k of the n samples, without replacement;
verl draws 1,000 times with replacement, which favours repetition. No torch.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import fmean

import numpy as np


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Chance that the majority of k of a problem's n samples is right.

    Self-consistency, arXiv:2203.11171 sec. 2, as an exact mean over all draws without replacement.
    Answers that tie for the most votes share the draw evenly. A sample without an answer is drawn
    but casts no vote; a draw without any vote is wrong. Of samples with equal answers and
    different verdicts, the answer is worth the mean.

    Counts in a draw without replacement are distributed as independent binomials given their sum.
    For each number of votes that may win, the answers that can reach it are folded in one by one,
    and the others at once: about n^2 k^2 small steps at most, and no draw is listed.

    Args:
        answers: (n,) normalised by the caller: equal texts are one answer.
        correct: (n,) verdicts.
        k: size of the draw, in [1, n].

    Returns:
        The chance, in [0, 1].

    Raises:
        ValueError: k is not in [1, n], or there are not as many verdicts as answers.
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
    """Chance, times that of k samples, that just so many votes win and the answer is right.

    Args:
        votes: of the winner, at least 1.
        classes: samples and mean verdict of each answer.
        n: samples.
        k: size of the draw.

    Returns:
        The product of both.
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
    """Each row of a table convolved with the chances of a count, cut to the table's width."""
    width = table.shape[1]
    if len(chances) < len(table):
        # Many ties of few votes each: a step for each number drawn, over all rows at once.
        folded = np.zeros_like(table)
        for drawn, chance in enumerate(chances):
            folded[:, drawn:] += chance * table[:, : width - drawn]
        return folded
    return np.stack([np.convolve(row, chances)[:width] for row in table])


def _shifted(table: np.ndarray, votes: int) -> np.ndarray:
    """One tie more, and so many samples drawn more."""
    moved = np.zeros_like(table)
    moved[1:, votes:] = table[:-1, : table.shape[1] - votes]
    return moved


@lru_cache(maxsize=256)
def _chances(count: int, n: int, k: int) -> np.ndarray:
    """(k + 1,) of each number drawn `_chance`; answers of one count share it."""
    chances = np.array([_chance(count, drawn, n, k) for drawn in range(k + 1)])
    chances.setflags(write=False)
    return chances


def _chance(count: int, drawn: int, n: int, k: int) -> float:
    """That so many of some samples are drawn, if each one is with chance k/n; rounded once."""
    return comb(count, drawn) * k**drawn * (n - k) ** max(0, count - drawn) / n**count


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Mean of the largest of k scores over all draws without replacement.

    The i-th smallest of n is the largest of ``C(i - 1, k - 1)`` of the ``C(n, k)`` draws. Of
    verdicts it is pass@k.

    Args:
        scores: (n,) of one problem.
        k: size of the draw, in [1, n].

    Returns:
        The mean.

    Raises:
        ValueError: k is not in [1, n].
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
