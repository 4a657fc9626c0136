"""The order in which training visits several sources by weight, as a pure function of the step.

Promises: `batch(step)` depends on the fields and the step, nothing else, so a resumed run needs no
saved cursor. After any number t of rows, each source has given floor(w t) or ceil(w t) of them,
where w is its share of the weights: never a row away from the exact share. Each source is visited
by one permutation of its rows after the other, and none of its rows is left out. The permutations
are those of `ResumableOrder`, from PCG64's raw stream.
Does not promise: that sources end together; a small source with a large weight repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import gcd, lcm

import numpy as np

from engines.data.order.resumable import Visits, permutation

MAX_PERIOD = 2**20
"""Rows after which a mixture repeats its order of sources, at most: a second or two to lay out."""


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """A seeded, endless visiting order over sources whose rows lie one source after another.

    Attributes:
        num_rows: rows of each source, at least 1.
        weights: of each source, above 0; taken as the decimals that they are written with. Numbers
            of rows give shares by size.
        batch_size: rows of one step, at least 1.
        seed: of the permutations, at least 0.

    Raises:
        ValueError: a field breaks its rule, or the weights have no period of `MAX_PERIOD` rows.
    """

    num_rows: tuple[int, ...]
    weights: tuple[float, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if not self.num_rows or min(self.num_rows) < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(f"need num_rows >= 1, batch_size >= 1, seed >= 0; got {self}")
        if len(self.weights) != len(self.num_rows):
            raise ValueError(f"weights: got {len(self.weights)}; need {len(self.num_rows)}")
        if sum(self._parts) > MAX_PERIOD:
            raise ValueError(
                f"weights: got {self.weights}, which repeat after {sum(self._parts)} rows; need at "
                f"most {MAX_PERIOD}; round them"
            )

    def batch(self, step: int) -> list[int]:
        """Row indices of one step.

        Args:
            step: 0-based.

        Returns:
            `batch_size` indices into all rows, those of the first source first, in visiting order.

        Raises:
            ValueError: the step is below 0.
        """
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        visited = self.visited(step)
        pattern = source_pattern(self._parts)
        start = step * self.batch_size % len(pattern)
        sources = pattern[(start + np.arange(self.batch_size)) % len(pattern)]
        rows = np.empty(self.batch_size, dtype=np.int64)
        for source, first_row in enumerate(self._first_rows):
            places = np.flatnonzero(sources == source)
            rows[places] = first_row + self._visits[source](visited[source], len(places))
        return rows.tolist()

    def visited(self, step: int) -> tuple[int, ...]:
        """Rows that each source gave before a step, repetitions counted."""
        pattern = source_pattern(self._parts)
        periods, rest = divmod(step * self.batch_size, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self._parts)).tolist()
        return tuple(
            periods * parts + count for parts, count in zip(self._parts, counts, strict=True)
        )

    def epochs(self, step: int) -> tuple[float, ...]:
        """Epochs of each source that are finished before a step, with their fraction."""
        return tuple(
            count / rows for count, rows in zip(self.visited(step), self.num_rows, strict=True)
        )

    def epoch(self, step: int) -> float:
        """Rows visited before a step, per row there is: the mean of `epochs`, by size."""
        return step * self.batch_size / sum(self.num_rows)

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        return whole_parts(self.weights)

    @property
    def _first_rows(self) -> list[int]:
        return [sum(self.num_rows[:source]) for source in range(len(self.num_rows))]

    @cached_property
    def _visits(self) -> list[Visits]:
        """The stream of each source's rows."""
        return [
            Visits(rows, partial(permutation, rows, derived_seed(self.seed, source)))
            for source, rows in enumerate(self.num_rows)
        ]


def derived_seed(seed: int, part: int) -> int:
    """A seed for one part of an order: equal parts of equal size are visited differently."""
    return int(np.random.PCG64(np.random.SeedSequence([seed, part])).random_raw())


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of some weights.

    Args:
        weights: above 0 and finite; 0.7 means seven tenths, not the nearest binary fraction.

    Returns:
        At least 1 each.

    Raises:
        ValueError: a weight is not above 0, or not finite.
    """
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights: got {tuple(weights)}; need finite numbers above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return tuple(each // gcd(*whole) for each in whole)


@lru_cache(maxsize=4)
def source_pattern(parts: tuple[int, ...]) -> np.ndarray:
    """The source of each row of one period.

    Row j of a source with share w may come from place floor(j / w) on, and has to come before
    place ceil((j + 1) / w). Taking the earliest deadline first meets them all, for one machine
    with unit jobs and a full load (Tijdeman, The chairman assignment problem, 1980; Baruah et al.,
    Proportionate progress, 1996), which is the floor and ceiling of w t after every t rows.

    Args:
        parts: of each source, at least 1.

    Returns:
        (sum of parts,) int64 source numbers, read-only; source s stands there `parts[s]` times.
    """
    period = sum(parts)
    given = [0] * len(parts)
    pattern = np.empty(period, dtype=np.int64)
    for place in range(period):
        _, source = min(
            (-(-(count + 1) * period // part), source)
            for source, (count, part) in enumerate(zip(given, parts, strict=True))
            if count * period // part <= place
        )
        given[source] += 1
        pattern[place] = source
    pattern.setflags(write=False)
    return pattern
