"""The order in which a stage visits its rows, as its section `order` configures it.

Orders that go from easy rows to difficult ones, as pure functions of the step.

Promises: `batch(step)` depends only on the fields and the step, so a resumed run needs no saved
cursor. `AscendingOrder` visits each row once per epoch. `BandedOrder` visits the open rows in one
permutation after the other and restarts when a band opens; from the last opening on, every epoch
holds every row once. A field out of range or a negative step raises `ValueError`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any

import numpy as np

from engines.config.data import OrderConfig
from engines.data.order.mixing import (
    MixedOrder,
    Order,
    ResumableOrder,
    Visits,
    derived_seed,
    permutation,
)
from infra.errors import ConfigError


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


@dataclass(frozen=True)
class VisitedRow:
    """The properties of a row that an order may use; only RL rows have `extra_info`."""

    data_source: str
    num_tokens: int
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class GroupedOrder:
    """A mixture over `rows`, the row indices grouped by source."""

    mixture: MixedOrder
    rows: tuple[int, ...]

    def batch(self, step: int) -> list[int]:
        """Return the row indices of a 0-based step."""
        return [self.rows[place] for place in self.mixture.batch(step)]

    def epoch(self, step: int) -> float:
        """Return the rows visited before a step divided by all rows."""
        return self.mixture.epoch(step)


def order_of(
    config: OrderConfig,
    rows: Sequence[VisitedRow],
    batch_size: int,
    seed: int,
    *,
    path: str,
    batches_per_step: int = 1,
) -> Order:
    """Return the order, over indices into `rows`, that a section configures.

    Args:
        config: valid by `engines.config.rules.batches.check_order`.
        batches_per_step: batches of one training step; bands open at training steps.

    Raises:
        ConfigError: weights or bands do not fit the rows, or a row has no difficulty.
    """
    if config.weights:
        return _mixed(config, rows, batch_size, seed, path)
    if config.kind == "shuffled":
        return ResumableOrder(num_rows=len(rows), batch_size=batch_size, seed=seed)
    difficulty = tuple(_difficulty(row, place, config, path) for place, row in enumerate(rows))
    if config.kind == "ascending":
        return AscendingOrder(difficulty=difficulty, batch_size=batch_size, seed=seed)
    bands = tuple(
        Band(
            max(difficulty) if band.max_difficulty is None else band.max_difficulty,
            band.first_step * batches_per_step,
        )
        for band in config.bands
    )
    try:
        return BandedOrder(difficulty=difficulty, bands=bands, batch_size=batch_size, seed=seed)
    except ValueError as error:
        raise ConfigError(f"{path}.bands", str(error).removeprefix("bands: ")) from None


def _mixed(
    config: OrderConfig, rows: Sequence[VisitedRow], batch_size: int, seed: int, path: str
) -> GroupedOrder:
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.data_source, []).append(place)
    if groups.keys() != config.weights.keys():
        raise ConfigError(
            f"{path}.weights",
            f"got {', '.join(sorted(config.weights))}; need a weight for each data_source of the "
            f"rows, and for no other: {', '.join(sorted(groups))}; name them",
        )
    try:
        mixture = MixedOrder(
            num_rows=tuple(len(group) for group in groups.values()),
            weights=tuple(config.weights[source] for source in groups),
            batch_size=batch_size,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(f"{path}.weights", str(error).removeprefix("weights: ")) from None
    return GroupedOrder(mixture, tuple(place for group in groups.values() for place in group))


def _difficulty(row: VisitedRow, place: int, config: OrderConfig, path: str) -> float:
    if config.difficulty is None:
        return float(row.num_tokens)
    value = row.extra_info.get(config.difficulty)
    # Valid rows hold only finite numbers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{path}.difficulty",
            f"got {config.difficulty}, which is {value!r:.40} in extra_info of row {place}; need a "
            "number in every row; name another key, or null for the number of tokens",
        )
    return float(value)
