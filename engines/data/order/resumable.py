"""The order in which training visits its rows, as a pure function of the step.

Promises: `batch(step)` depends only on (num_rows, batch_size, seed, step), so a resumed run needs
no saved cursor and reads the same rows. The stream is one permutation per epoch after the other:
no remainder is dropped, and a batch may span two epochs (and then hold a row twice).
PCG64's raw stream, which numpy guarantees never to change, gives the permutations.
A field out of range or a negative step raises `ValueError`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
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
