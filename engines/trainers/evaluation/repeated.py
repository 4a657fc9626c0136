"""Treat rows that repeat a problem as one problem; imports no torch.

The AIME files of verl and DAPO repeat each of 30 problems 32 times: such rows are a cluster, not
independent trials. A mean over rows stays the same, while its uncertainty counts distinct problems.
Without repetition the numbers are those of rows, bit for bit.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from engines.trainers.evaluation.accuracy import wilson_interval


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
