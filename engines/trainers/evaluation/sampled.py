"""What sampled answers are worth over problems, with intervals.

Promises: equal inputs give equal results, on every version of numpy; intervals count distinct
problems, however many rows ask each. No torch.
Does not promise: an interval that is right for a handful of problems, or where all values are
equal and are no verdicts; a bootstrap knows no more than what it saw.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean

import numpy as np

from engines.trainers.evaluation.accuracy import pass_at_k
from engines.trainers.evaluation.at_k import best_at_k, maj_at_k
from engines.trainers.evaluation.repeated import ProblemSums, share_interval, sums_by_problem

NUM_DRAWS = 2_000
MAX_CELLS = 2**22
"""Problems that are drawn at once."""


@dataclass(frozen=True)
class SampledAnswer:
    """One sample that could be scored.

    Attributes:
        answer: what the reward function read, empty where it found none; None where it does not
            say.
        correct: whether it counts as right.
        score: of the reward function, finite.
    """

    answer: str | None
    correct: bool
    score: float


@dataclass(frozen=True)
class Estimate:
    """A mean over rows and the interval around it.

    Attributes:
        mean: of the rows' values.
        low: lower bound, at most the mean.
        high: upper bound, at least the mean.
        num_problems: distinct ones, with enough samples to have a value.
    """

    mean: float
    low: float
    high: float
    num_problems: int


def bootstrap_interval(
    values: ProblemSums, confidence: float, seed: int, num_draws: int = NUM_DRAWS
) -> tuple[float, float]:
    """The percentile bootstrap of a mean over rows (Efron and Tibshirani, 1993, sec. 13.3).

    Whole problems are drawn with replacement, with all of their rows (the cluster bootstrap: Field
    and Welsh, Bootstrapping Clustered Data, JRSS B 69, 2007), by PCG64's raw stream, which numpy
    guarantees.

    Args:
        values: of P distinct problems, at least one.
        confidence: coverage, e.g. 0.95.
        seed: at least 0.
        num_draws: of P problems each.

    Returns:
        Lower and upper bound; the mean itself lies between them.

    Raises:
        ValueError: there is no value.
    """
    if not values.sums:
        raise ValueError("got no values; need one or more")
    sums, weights = np.asarray(values.sums), np.asarray(values.num_rows, dtype=np.float64)
    stream = np.random.PCG64(np.random.SeedSequence(seed))
    num_at_once = max(1, MAX_CELLS // len(sums))
    means: list[float] = []
    for start in range(0, num_draws, num_at_once):
        size = (min(num_at_once, num_draws - start), len(sums))
        # The remainder of 64 bits is uniform to one part in 2^64 / P.
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
    """The mean of some rows' values: Wilson's interval of verdicts, a bootstrap of others.

    Args:
        rows: what names the problem of each, and its value; at least one. Verdicts if all are 0 or
            1, and equal where they are of one problem.
        confidence: coverage of the interval.
        seed: of the bootstrap.
        num_draws: of the bootstrap.

    Returns:
        The estimate.

    Raises:
        ValueError: there is no value.
    """
    problems, values = sums_by_problem(rows), [value for _, value in rows]
    has_one_verdict_each = len(set(rows)) == len(problems.sums) and {*values} <= {0, 1}
    if rows and has_one_verdict_each:
        low, high = share_interval(problems, confidence)
    else:
        low, high = bootstrap_interval(problems, confidence, seed, num_draws)
    mean = fmean(values)
    return Estimate(mean, min(low, mean), max(high, mean), len(problems.sums))


def sampled_values(samples: Sequence[SampledAnswer], k: int) -> dict[str, float]:
    """What one problem contributes to the metrics at k.

    Args:
        samples: of the problem, those that could be scored.
        k: size of the draw, at least 1.

    Returns:
        `avg@k` (the share that is right, whatever k), `pass@k`, `best@k` (of scores), and `maj@k`
        where the reward says of every sample what it read; nothing with fewer than k samples.
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
    """Whether the reward says of each sample what it read."""
    return all(sample.answer is not None for sample in samples)


def sampled_metrics(
    rows: Sequence[tuple[Hashable, Sequence[SampledAnswer]]],
    ks: Sequence[int],
    confidence: float,
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> dict[str, Estimate]:
    """What sampled answers are worth, over rows.

    Args:
        rows: what names the problem of each, and its samples that could be scored.
        ks: sizes of draws, at least 1 each.
        confidence: coverage of the intervals.
        seed: of the bootstrap.
        num_draws: of the bootstrap.

    Returns:
        The metrics of `sampled_values`, over the rows with at least k samples. What no row
        has is not there; `maj@k` is not there either unless the reward says every answer, for a
        vote over some of the rows would be compared with the others.
    """
    values: defaultdict[str, list[tuple[Hashable, float]]] = defaultdict(list)
    votes = all(says_answers(samples) for _, samples in rows)
    for problem, samples in rows:
        for k in dict.fromkeys(ks):
            for name, value in sampled_values(samples, k).items():
                if votes or not name.startswith("maj@"):
                    values[name].append((problem, value))
    return {name: estimate(values[name], confidence, seed, num_draws) for name in sorted(values)}
