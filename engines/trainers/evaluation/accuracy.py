"""Metrics of answers over problems, with intervals: accuracy, pass@k, maj@k, avg@k, best@k.

Every value at k is the exact mean over all draws of k of a problem's n samples without replacement;
verl draws 1,000 times with replacement, which favours repetition. Rows that repeat a problem are a
cluster, not independent trials (the AIME files of verl and DAPO repeat each of 30 problems 32
times): a mean over rows stays the same, while its uncertainty counts distinct problems. Imports no
torch.

Promises: equal inputs give equal results on every version of numpy; without repeated problems the
results equal those over rows, bit for bit.
Does not promise: a correct interval for few problems, or for equal values that are not verdicts.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, fsum, sqrt
from statistics import NormalDist, fmean

import numpy as np

NUM_DRAWS = 2_000
MAX_CELLS = 2**22
"""Bound on draws x problems that are computed at once."""


@dataclass(frozen=True)
class ProblemSums:
    """For each of P distinct problems, by first occurrence: sum of values, and number of rows."""

    sums: tuple[float, ...]
    num_rows: tuple[int, ...]

    @property
    def weighted_means(self) -> list[float]:
        """(P,) sums times P / number of all rows, so that their mean is the mean over rows."""
        scale = len(self.sums) / sum(self.num_rows)
        return [each * scale for each in self.sums]


def sums_by_problem(rows: Iterable[tuple[Hashable, float]]) -> ProblemSums:
    """Add up the values of rows of the same problem."""
    sums: dict[Hashable, float] = {}
    num_rows: dict[Hashable, int] = {}
    for problem, value in rows:
        sums[problem] = sums.get(problem, 0.0) + value
        num_rows[problem] = num_rows.get(problem, 0) + 1
    return ProblemSums(tuple(sums.values()), tuple(num_rows.values()))


def share_interval(verdicts: ProblemSums, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share over rows that repeat problems.

    A problem that is right in all of its n rows, or in none, is one verdict with weight n. The
    share of N rows then has variance ``p (1 - p) sum(n^2) / N^2``: that of the effective number
    ``N^2 / sum(n^2)`` of equally weighted verdicts (Kish, Weighting for Unequal P_i, Journal of
    Official Statistics 8, 1992), which replaces the trials in the score equation. If copies of a
    problem have different verdicts, the interval is wider than needed, never narrower.
    """
    num_right, num_rows = sum(verdicts.sums), sum(verdicts.num_rows)
    # Exact if no problem repeats; rounding must not make successes exceed the trials.
    effective = max(1.0, num_rows**2 / max(1, sum(each**2 for each in verdicts.num_rows)))
    right = min(effective, num_right * effective / max(1, num_rows))
    low, high = wilson_interval(right, effective if num_rows else 0, confidence)
    return min(low, num_right / num_rows), max(high, num_right / num_rows)


@dataclass(frozen=True)
class SampledAnswer:
    """One scored sample; `answer` is the reward's extract, "" if nothing, None if unreported."""

    answer: str | None
    correct: bool
    score: float


@dataclass(frozen=True)
class Estimate:
    """A mean over rows, its interval, and the number of distinct problems."""

    mean: float
    low: float
    high: float
    num_problems: int


def bootstrap_interval(
    values: ProblemSums, confidence: float, seed: int, num_draws: int = NUM_DRAWS
) -> tuple[float, float]:
    """Return the percentile bootstrap of a mean over rows (Efron and Tibshirani, 1993, sec. 13.3).

    Whole problems are drawn with replacement, with all of their rows (the cluster bootstrap: Field
    and Welsh, Bootstrapping Clustered Data, JRSS B 69, 2007), from PCG64's raw stream, which numpy
    keeps stable. The mean lies between the bounds. Raises `ValueError` if there is no value.
    """
    if not values.sums:
        raise ValueError("got no values; need one or more")
    sums, weights = np.asarray(values.sums), np.asarray(values.num_rows, dtype=np.float64)
    stream = np.random.PCG64(np.random.SeedSequence(seed))
    num_at_once = max(1, MAX_CELLS // len(sums))
    means: list[float] = []
    for start in range(0, num_draws, num_at_once):
        size = (min(num_at_once, num_draws - start), len(sums))
        # The remainder of 64 bits modulo P is uniform to one part in 2^64 / P.
        drawn = stream.random_raw(size) % len(sums)
        means += (sums[drawn].sum(axis=1) / weights[drawn].sum(axis=1)).tolist()
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(means, tails, method="inverted_cdf").tolist()
    mean = fsum(values.sums) / sum(values.num_rows)
    return min(low, mean), max(high, mean)


def estimate(
    rows: Sequence[tuple[Hashable, float]],
    confidence: float,
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> Estimate:
    """Return the rows' mean; Wilson's interval if each problem has one verdict, else bootstrap."""
    problems, values = sums_by_problem(rows), [value for _, value in rows]
    has_one_verdict_each = len(set(rows)) == len(problems.sums) and {*values} <= {0, 1}
    low, high = (
        share_interval(problems, confidence)
        if rows and has_one_verdict_each
        else bootstrap_interval(problems, confidence, seed, num_draws)
    )
    mean = fmean(values)
    return Estimate(mean, min(low, mean), max(high, mean), len(problems.sums))


def sampled_values(samples: Sequence[SampledAnswer], k: int) -> dict[str, float]:
    """Return one problem's contributions to the metrics at k; empty with fewer than k samples.

    `avg@k` (the share that is right, for any k), `pass@k`, `best@k` (of scores), and `maj@k` if the
    reward reports an answer for every sample.
    """
    if len(samples) < k:
        return {}
    correct = [sample.correct for sample in samples]
    values = {
        f"avg@{k}": fmean(correct),
        f"pass@{k}": pass_at_k(len(correct), sum(correct), k),
        f"best@{k}": best_at_k([sample.score for sample in samples], k),
    }
    if says_answers(samples):
        values[f"maj@{k}"] = maj_at_k([sample.answer or None for sample in samples], correct, k)
    return values


def says_answers(samples: Sequence[SampledAnswer]) -> bool:
    """Return True if the reward reports the answer that it extracted from each sample."""
    return all(sample.answer is not None for sample in samples)


def sampled_metrics(
    rows: Sequence[tuple[Hashable, Sequence[SampledAnswer]]],
    ks: Sequence[int],
    confidence: float,
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> dict[str, Estimate]:
    """Return the metrics of `sampled_values` over the rows (problem, samples) with k samples.

    `maj@k` needs the answers of all rows, to be comparable with the other metrics.
    """
    values: defaultdict[str, list[tuple[Hashable, float]]] = defaultdict(list)
    votes = all(says_answers(samples) for _, samples in rows)
    for problem, samples in rows:
        for k in dict.fromkeys(ks):
            for name, value in sampled_values(samples, k).items():
                if votes or not name.startswith("maj@"):
                    values[name].append((problem, value))
    return {name: estimate(values[name], confidence, seed, num_draws) for name in sorted(values)}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

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
    """Return the probability that a right winner has `votes` votes, times that of drawing k.

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

    The i-th smallest of n is the largest of ``C(i - 1, k - 1)`` of the ``C(n, k)`` draws. For
    verdicts it is pass@k. Raises `ValueError` if k is not in [1, n].
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"best@{k} of {len(scores)} scores is not defined")
    draws = comb(len(scores), k)
    return sum(
        score * (comb(place, k - 1) / draws)
        for place, score in enumerate(sorted(scores))
        if place >= k - 1
    )
