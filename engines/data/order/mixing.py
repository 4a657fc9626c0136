"""The order in which training visits several sources by weight, as a pure function of the step.

Promises: `batch(step)` depends only on the fields and the step, so a resumed run needs no saved
cursor. After any number t of rows, a source with share w of the weights has given floor(w t) or
ceil(w t) of them. Each source is visited in one permutation of all its rows after the other, as
in `ResumableOrder`. A field out of range or a negative step raises `ValueError`.
Does not promise: that sources end together; a small source with a large weight repeats.

The order in which training visits its rows, as a pure function of the step.

Promises: `batch(step)` depends only on (num_rows, batch_size, seed, step), so a resumed run needs
no saved cursor and reads the same rows. The stream is one permutation per epoch after the other:
no remainder is dropped, and a batch may span two epochs (and then hold a row twice).
PCG64's raw stream, which numpy guarantees never to change, gives the permutations.
A field out of range or a negative step raises `ValueError`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import gcd, lcm
from typing import Protocol

import numpy as np


class Order(Protocol):
    """A seeded, endless visiting order over rows; every implementation is a pure function."""

    def batch(self, step: int) -> list[int]:
        """Return the row indices of a 0-based step."""
        ...

    def epoch(self, step: int) -> float:
        """Return the passes over the rows finished before a step, with their fraction."""
        ...


@dataclass(frozen=True, kw_only=True)
class ResumableOrder:
    """A seeded, endless visiting order over `num_rows` rows."""

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(f"need num_rows >= 1, batch_size >= 1, seed >= 0; got {self}")

    def batch(self, step: int) -> list[int]:
        """Return the `batch_size` row indices of a 0-based step, in visiting order."""
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        return self._visits(step * self.batch_size, self.batch_size).tolist()

    def epoch(self, step: int) -> float:
        """Return the epochs finished before a step, with their fraction."""
        return step * self.batch_size / self.num_rows

    @cached_property
    def _visits(self) -> "Visits":
        return Visits(self.num_rows, partial(permutation, self.num_rows, self.seed))


class Visits:
    """An endless stream of the rows that `epoch_rows`, a pure function, returns for each epoch.

    The last two epochs are cached, since a batch may span two.
    """

    def __init__(self, num_rows: int, epoch_rows: Callable[[int], np.ndarray]) -> None:
        self._num_rows = num_rows
        self._epoch_rows = lru_cache(maxsize=2)(epoch_rows)

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Return `count` rows from visit number `first` (0-based), (count,) int64."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(first, self._num_rows)
            piece = self._epoch_rows(epoch)[offset : offset + count]
            pieces.append(piece)
            first, count = first + len(piece), count - len(piece)
        return np.concatenate(pieces)


def permutation(num_rows: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return a read-only (num_rows,) int64 permutation that depends only on the arguments."""
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    keys = stream.random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


MAX_PERIOD = 2**20
"""Limit of the period, in rows, of the order of sources; it takes a second or two to compute."""


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """A seeded, endless visiting order over sources that are stored one after another.

    `weights` count as exact decimals, with a period of at most `MAX_PERIOD` rows. The numbers of
    rows as weights give shares by size.
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
        """Return the `batch_size` row indices of a 0-based step, counted through all sources."""
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
        """Return how many rows each source gave before a step, repetitions counted."""
        pattern = source_pattern(self._parts)
        periods, rest = divmod(step * self.batch_size, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self._parts)).tolist()
        return tuple(
            periods * parts + count for parts, count in zip(self._parts, counts, strict=True)
        )

    def epochs(self, step: int) -> tuple[float, ...]:
        """Return the epochs of each source finished before a step, with their fraction."""
        return tuple(
            count / rows for count, rows in zip(self.visited(step), self.num_rows, strict=True)
        )

    def epoch(self, step: int) -> float:
        """Return the rows visited before a step divided by all rows."""
        return step * self.batch_size / sum(self.num_rows)

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        return whole_parts(self.weights)

    @property
    def _first_rows(self) -> list[int]:
        return [sum(self.num_rows[:source]) for source in range(len(self.num_rows))]

    @cached_property
    def _visits(self) -> list[Visits]:
        return [
            Visits(rows, partial(permutation, rows, derived_seed(self.seed, source)))
            for source, rows in enumerate(self.num_rows)
        ]


def derived_seed(seed: int, part: int) -> int:
    """Return a seed for one part of an order, so that parts of equal size get different orders."""
    return int(np.random.PCG64(np.random.SeedSequence([seed, part])).random_raw())


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the proportion of weights that are finite and above 0.

    A weight counts as its decimal text: 0.7 is seven tenths, not the nearest binary fraction.
    """
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights: got {tuple(weights)}; need finite numbers above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return tuple(each // gcd(*whole) for each in whole)


@lru_cache(maxsize=4)
def source_pattern(parts: tuple[int, ...]) -> np.ndarray:
    """Return the source of each row of one period, (sum of parts,) int64, read-only.

    Row j of a source with share w is released at place floor(j / w) and due before place
    ceil((j + 1) / w). Earliest deadline first meets all deadlines for one machine with unit jobs
    and full load (Tijdeman, The chairman assignment problem, 1980; Baruah et al., Proportionate
    progress, 1996). So a source has given floor(w t) or ceil(w t) rows after every t.
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
