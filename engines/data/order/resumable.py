"""The order in which training visits its rows, as a pure function of the step.

Promises: `batch(step)` depends on (num_rows, batch_size, seed, step) and nothing else, so a
resumed run needs no saved cursor and reads the same rows; in every epoch each row occurs once.
The stream is the concatenation of one permutation per epoch: a batch may span two epochs (and
then may hold a row twice), and no row is ever left out because of a remainder.
The permutations come from PCG64's raw stream, which numpy guarantees never to change.
Steps in sequence sort the rows once an epoch; what is kept for that changes no batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Protocol

import numpy as np


class Order(Protocol):
    """A seeded, endless visiting order over rows; every kind of it is a pure function."""

    def batch(self, step: int) -> list[int]:
        """Row indices of one step; 0-based."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the rows finished before a step, with their fraction."""
        ...


@dataclass(frozen=True, kw_only=True)
class ResumableOrder:
    """A seeded, endless visiting order over `num_rows` rows.

    Attributes:
        num_rows: rows of the split, at least 1.
        batch_size: rows of one step, at least 1.
        seed: of the permutations, at least 0.
    """

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.batch_size < 1 or self.seed < 0:
            raise ValueError(f"need num_rows >= 1, batch_size >= 1, seed >= 0; got {self}")

    def batch(self, step: int) -> list[int]:
        """Row indices of one step.

        Args:
            step: 0-based.

        Returns:
            `batch_size` indices into the split, in visiting order.
        """
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        return self._visits(step * self.batch_size, self.batch_size).tolist()

    def epoch(self, step: int) -> float:
        """Epochs finished before `step`, with its fraction."""
        return step * self.batch_size / self.num_rows

    @cached_property
    def _visits(self) -> "Visits":
        return Visits(self.num_rows, partial(permutation, self.num_rows, self.seed))


class Visits:
    """An endless stream of rows, one epoch after the other.

    The two epochs that were read last are kept: a batch may span them.

    Args:
        num_rows: of an epoch, at least 1.
        epoch_rows: the order of an epoch's rows, (num_rows,) int64; a pure function.
    """

    def __init__(self, num_rows: int, epoch_rows: Callable[[int], np.ndarray]) -> None:
        self._num_rows = num_rows
        self._epoch_rows = lru_cache(maxsize=2)(epoch_rows)

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Some visits in a row.

        Args:
            first: 0-based number of the first one.
            count: how many, at least 0.

        Returns:
            (count,) int64 rows.
        """
        pieces = [np.empty(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(first, self._num_rows)
            piece = self._epoch_rows(epoch)[offset : offset + count]
            pieces.append(piece)
            first, count = first + len(piece), count - len(piece)
        return np.concatenate(pieces)


def permutation(num_rows: int, seed: int, epoch: int = 0) -> np.ndarray:
    """A permutation of `range(num_rows)`, the same on every machine and numpy version.

    Args:
        num_rows: how many.
        seed: at least 0.
        epoch: a second seed.

    Returns:
        (num_rows,) int64, read-only.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    keys = stream.random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
