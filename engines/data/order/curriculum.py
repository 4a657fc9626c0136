"""Orders that go from easy rows to difficult ones, as pure functions of the step.

Promises: `batch(step)` depends on the fields and the step, nothing else, so a resumed run needs no
saved cursor. `AscendingOrder` visits each row once in every epoch. `BandedOrder` visits the open
rows by one permutation after the other, and begins anew when a band opens: from the last opening
on, every epoch holds every row once. Permutations come from PCG64's raw stream.
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
    """Every epoch from the easiest row to the most difficult; equal ones in seeded order.

    Attributes:
        difficulty: of each row, finite; at least one.
        batch_size: rows of one step, at least 1.
        seed: of the order of equally difficult rows, at least 0.

    Raises:
        ValueError: a field breaks its rule.
    """

    difficulty: tuple[float, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        _check(self.difficulty, self.batch_size, self.seed)

    def batch(self, step: int) -> list[int]:
        """Row indices of one step, which may span two epochs.

        Args:
            step: 0-based.

        Returns:
            `batch_size` indices, in visiting order.

        Raises:
            ValueError: the step is below 0.
        """
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        return self._visits(step * self.batch_size, self.batch_size).tolist()

    def epoch(self, step: int) -> float:
        """Epochs finished before a step, with its fraction."""
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
    """Rows that are let in together.

    Attributes:
        max_difficulty: of its rows; the band before has the easier ones.
        first_step: 0-based step that may visit them first.
    """

    max_difficulty: float
    first_step: int


@dataclass(frozen=True, kw_only=True)
class BandedOrder:
    """The rows of all bands that are open, in seeded order.

    Attributes:
        difficulty: of each row, finite; at least one.
        bands: from easy to difficult; the first is open at step 0 and holds a row, the last holds
            the most difficult one.
        batch_size: rows of one step, at least 1.
        seed: of the permutations, at least 0.

    Raises:
        ValueError: a field breaks its rule.
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
        """Row indices of one step.

        Args:
            step: 0-based.

        Returns:
            `batch_size` indices of rows that are open, in visiting order.

        Raises:
            ValueError: the step is below 0.
        """
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        stage = max(number for number, band in enumerate(self.bands) if band.first_step <= step)
        rows, order = self._open_rows(stage)
        return rows[order.batch(step - self.bands[stage].first_step)].tolist()

    def epoch(self, step: int) -> float:
        """Passes over the rows that were open, finished before a step, with their fraction."""
        ends = [*(band.first_step for band in self.bands[1:]), step]
        return sum(
            max(0, min(end, step) - band.first_step) * self.batch_size / num_open
            for band, end, num_open in zip(self.bands, ends, self._num_open, strict=True)
        )

    @cached_property
    def _num_open(self) -> list[int]:
        """Rows that are open from each band on."""
        return [int((self._difficulty <= band.max_difficulty).sum()) for band in self.bands]

    @cached_property
    def _open_rows(self) -> Callable[[int], tuple[np.ndarray, ResumableOrder]]:
        """Of a band's number the open rows and how they are visited; the last ones are kept."""

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
