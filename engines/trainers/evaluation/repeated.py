"""Rows that ask one problem several times, as one problem. Pure, no torch.

The AIME files of verl and DAPO have each of 30 problems 32 times. Greedy answers to one prompt are
equal, sampled ones depend on how difficult it is: such rows are a cluster, not independent trials.

Promises: a mean over rows stays the mean over rows; what is said of its uncertainty counts distinct
problems. Where every problem stands once, the numbers are those of rows, bit for bit.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from engines.trainers.evaluation.accuracy import wilson_interval


@dataclass(frozen=True)
class ProblemSums:
    """Values of rows, added up for each distinct problem, in the order of their first rows.

    Attributes:
        sums: (P,) of the values of a problem's rows.
        num_rows: (P,) rows of each problem, at least 1.
    """

    sums: tuple[float, ...]
    num_rows: tuple[int, ...]

    @property
    def weighted_means(self) -> list[float]:
        """(P,) the mean of each problem's rows, weighted so that their mean is that over rows."""
        scale = len(self.sums) / sum(self.num_rows)
        return [each * scale for each in self.sums]


def sums_by_problem(rows: Iterable[tuple[Hashable, float]]) -> ProblemSums:
    """Add up the values of rows that hold one problem.

    Args:
        rows: what names the problem of a row, and the row's value.

    Returns:
        The sums; none of no rows.
    """
    sums: dict[Hashable, float] = {}
    num_rows: dict[Hashable, int] = {}
    for problem, value in rows:
        sums[problem] = sums.get(problem, 0.0) + value
        num_rows[problem] = num_rows.get(problem, 0) + 1
    return ProblemSums(tuple(sums.values()), tuple(num_rows.values()))


def share_interval(verdicts: ProblemSums, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share over rows that repeat problems.

    A problem that is right in all of its n rows, or in none, is one verdict with weight n. The
    share of N rows then has variance ``p (1 - p) sum(n^2) / N^2``: that of the effective number
    ``N^2 / sum(n^2)`` of equally weighted verdicts (Kish, Weighting for Unequal P_i, Journal of
    Official Statistics 8, 1992), which takes the place of the trials in the score equation. Where
    copies of a problem are answered differently, the variance is smaller: the interval is then
    wider than needed, never narrower.

    Args:
        verdicts: of rows that are 0 or 1; at least one.
        confidence: coverage, e.g. 0.95.

    Returns:
        Lower and upper bound, with the share between them.

    Raises:
        ValueError: there is no row.
    """
    num_right, num_rows = sum(verdicts.sums), sum(verdicts.num_rows)
    # Each is exact where every problem stands once; a rounding error must not exceed the trials.
    effective = max(1.0, num_rows**2 / max(1, sum(each**2 for each in verdicts.num_rows)))
    right = min(effective, num_right * effective / max(1, num_rows))
    low, high = wilson_interval(right, effective if num_rows else 0, confidence)
    return min(low, num_right / num_rows), max(high, num_right / num_rows)
