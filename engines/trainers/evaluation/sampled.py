"""Metrics of sampled answers over problems, with intervals; imports no torch.

Promises: equal inputs give equal results on every version of numpy; intervals count distinct
problems. Does not promise: a correct interval for few problems, or for equal values that are not
verdicts.

Treat rows that repeat a problem as one problem; imports no torch.

The AIME files of verl and DAPO repeat each of 30 problems 32 times: such rows are a cluster, not
independent trials. A mean over rows stays the same, while its uncertainty counts distinct problems.
Without repetition the numbers are those of rows, bit for bit.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean

import numpy as np

from engines.trainers.evaluation.accuracy import best_at_k, maj_at_k, pass_at_k, wilson_interval


@dataclass(frozen=True)
class ProblemSums:
    """Sums of P distinct problems' values and their number of rows, by first occurrence."""

    sums: tuple[float, ...]
    num_rows: tuple[int, ...]

    @property
    def weighted_means(self) -> list[float]:
        """(P,) the mean of each problem's rows, weighted so that their mean is that over rows."""
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


NUM_DRAWS = 2_000
MAX_CELLS = 2**22
"""Problems that are drawn at once."""


@dataclass(frozen=True)
class SampledAnswer:
    """One scored sample, and the `answer` that the reward read: "" if none, None if unreported."""

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
    guarantees. The mean lies between the bounds. Raises `ValueError` if there is no value.
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
    """Return the mean of rows' values with Wilson's interval for verdicts, else a bootstrap."""
    problems, values = sums_by_problem(rows), [value for _, value in rows]
    has_one_verdict_each = len(set(rows)) == len(problems.sums) and {*values} <= {0, 1}
    if rows and has_one_verdict_each:
        low, high = share_interval(problems, confidence)
    else:
        low, high = bootstrap_interval(problems, confidence, seed, num_draws)
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
    """Return True if the reward reports the answer that it read of each sample."""
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
