"""The gain of a policy over its start on the same problems, over seeds, with an interval.

Percentile bootstrap (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, sec. 13.3) of
paired differences (Koehn, Statistical Significance Tests for Machine Translation Evaluation,
EMNLP 2004, sec. 4): problems are drawn again with both of their verdicts, within each seed. So it
speaks of problems like these; the seeds are the ones that were run. It says how much was gained;
whether chance could have done it, of two models alone, is `engines.trainers.evaluation.comparison`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_DRAWS = 100_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedVerdicts:
    """One seed: whether each problem was answered rightly, before and after.

    Attributes:
        before: by the start.
        after: by the end, on the same problems in the same order.
    """

    before: tuple[bool, ...]
    after: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.before or len(self.before) != len(self.after):
            raise ValueError(
                f"got {len(self.before)} verdicts before and {len(self.after)} after; need as many"
            )

    @property
    def accuracy_before(self) -> float:
        """Share of right answers of the start."""
        return sum(self.before) / len(self.before)

    @property
    def accuracy_after(self) -> float:
        """Share of right answers of the end."""
        return sum(self.after) / len(self.after)

    @property
    def num_changes(self) -> tuple[int, int, int]:
        """Problems that were lost, that stayed as they were, and that were won."""
        pairs = list(zip(self.before, self.after, strict=True))
        num_won = sum(after and not before for before, after in pairs)
        num_lost = sum(before and not after for before, after in pairs)
        return num_lost, len(pairs) - num_lost - num_won, num_won


@dataclass(frozen=True)
class Gain:
    """A difference of accuracies over all seeds.

    Attributes:
        mean: end minus start.
        low: lower end of the interval.
        high: upper end.
        num_worse_seeds: seeds whose end is below their start.
    """

    mean: float
    low: float
    high: float
    num_worse_seeds: int

    @property
    def holds(self) -> bool:
        """Whether the interval lies above 0 and no seed became worse."""
        return self.low > 0 and self.num_worse_seeds == 0


def paired_gain(
    seeds: Sequence[PairedVerdicts], confidence: float = CONFIDENCE, num_draws: int = NUM_DRAWS
) -> Gain:
    """The gain over all seeds; equal verdicts give equal bounds.

    A problem drawn again has one of three differences, so that a draw of n problems is a draw of
    three counts.

    Args:
        seeds: one or more.
        confidence: of the interval.
        num_draws: of the bootstrap.

    Returns:
        The gain.

    Raises:
        ValueError: no seed.
    """
    if not seeds:
        raise ValueError("got no seeds; need one or more")
    draw = np.random.default_rng(0)
    sums, num_problems = np.zeros(num_draws), 0
    for seed in seeds:
        changes = np.array(seed.num_changes)
        num_problems += changes.sum()
        counts = draw.multinomial(changes.sum(), changes / changes.sum(), size=num_draws)
        sums += counts[:, 2] - counts[:, 0]
    tail = (1 - confidence) / 2
    # A bound is one of the draws: differences come in steps of one problem.
    low, high = np.quantile(sums / num_problems, [tail, 1 - tail], method="inverted_cdf")
    won = sum(seed.num_changes[2] - seed.num_changes[0] for seed in seeds)
    num_worse = sum(seed.accuracy_after < seed.accuracy_before for seed in seeds)
    return Gain(won / int(num_problems), float(low), float(high), num_worse)
