"""Orders that go from easy rows to difficult ones, as pure functions of the step.

Promises: `batch(step)` depends only on the fields and the step, so a resumed run needs no saved
cursor. `AscendingOrder` visits each row once per epoch. `BandedOrder` visits the open rows in one
permutation after the other and restarts when a band opens; from the last opening on, every epoch
holds every row once. A field out of range or a negative step raises `ValueError`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite

import numpy as np

from engines.data.order.mixing import derived_seed
from engines.data.order.resumable import ResumableOrder, Visits, permutation


@dataclass(frozen=True, kw_only=True)
class AscendingOrder:
    """Visits the rows from easy to difficult in every epoch, equal ones in seeded order."""

    difficulty: tuple[float, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        _check(self.difficulty, self.batch_size, self.seed)

    def batch(self, step: int) -> list[int]:
        """Return the `batch_size` row indices of a 0-based step, which may span two epochs."""
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        return self._visits(step * self.batch_size, self.batch_size).tolist()

    def epoch(self, step: int) -> float:
        """Return the epochs finished before a step, with their fraction."""
        return step * self.batch_size / len(self.difficulty)

    @cached_property
    def _visits(self) -> Visits:
        difficulty = np.asarray(self.difficulty)

        def epoch_rows(epoch: int) -> np.ndarray:
            shuffled = permutation(len(difficulty), self.seed, epoch)
            return shuffled[np.argsort(difficulty[shuffled], kind="stable")]

        return Visits(len(difficulty), epoch_rows)


@dataclass(frozen=True)
class Band:
    """Rows of at most `max_difficulty`, which steps from the 0-based `first_step` on may visit."""

    max_difficulty: float
    first_step: int


@dataclass(frozen=True, kw_only=True)
class BandedOrder:
    """Visits the rows of all open bands in seeded order.

    The bands rise in both fields. The first opens at step 0 and has a row; the last includes the
    most difficult row.
    """

    difficulty: tuple[float, ...]
    bands: tuple[Band, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        _check(self.difficulty, self.batch_size, self.seed)
        steps = [band.first_step for band in self.bands]
        limits = [band.max_difficulty for band in self.bands]
        if steps[:1] != [0] or steps != sorted(set(steps)) or limits != sorted(set(limits)):
            raise ValueError(f"bands: got {self.bands}; need both to rise, the steps from 0")
        if limits[0] < min(self.difficulty) or limits[-1] < max(self.difficulty):
            raise ValueError(
                f"bands: got {limits[0]} to {limits[-1]}; need a row in the first and every row in "
                f"the last; difficulty is {min(self.difficulty)} to {max(self.difficulty)}"
            )

    def batch(self, step: int) -> list[int]:
        """Return the `batch_size` row indices of a 0-based step, in visiting order."""
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        stage = max(number for number, band in enumerate(self.bands) if band.first_step <= step)
        rows, order = self._open_rows(stage)
        return rows[order.batch(step - self.bands[stage].first_step)].tolist()

    def epoch(self, step: int) -> float:
        """Return the passes over the open rows finished before a step, with their fraction."""
        ends = [*(band.first_step for band in self.bands[1:]), step]
        return sum(
            max(0, min(end, step) - band.first_step) * self.batch_size / num_open
            for band, end, num_open in zip(self.bands, ends, self._num_open, strict=True)
        )

    @cached_property
    def _num_open(self) -> list[int]:
        return [int((self._difficulty <= band.max_difficulty).sum()) for band in self.bands]

    @cached_property
    def _open_rows(self) -> Callable[[int], tuple[np.ndarray, ResumableOrder]]:
        def open_rows(stage: int) -> tuple[np.ndarray, ResumableOrder]:
            rows = np.flatnonzero(self._difficulty <= self.bands[stage].max_difficulty)
            seed = derived_seed(self.seed, stage)
            return rows, ResumableOrder(num_rows=len(rows), batch_size=self.batch_size, seed=seed)

        return lru_cache(maxsize=1)(open_rows)

    @cached_property
    def _difficulty(self) -> np.ndarray:
        return np.asarray(self.difficulty)


def _check(difficulty: tuple[float, ...], batch_size: int, seed: int) -> None:
    if not difficulty or not all(map(isfinite, difficulty)):
        raise ValueError(f"difficulty: got {len(difficulty)} rows; need finite ones, at least 1")
    if batch_size < 1 or seed < 0:
        raise ValueError(
            f"need batch_size >= 1, seed >= 0; got batch_size={batch_size}, seed={seed}"
        )
