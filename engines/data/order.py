"""The order in which training visits its rows, as a pure function of the step.

Promises: `batch(step)` depends only on the fields and the step, so a resumed run needs no saved
cursor and reads the same rows. The stream of `ResumableOrder` is one permutation per epoch after
the other: no remainder is dropped, and a batch may span two epochs (and then hold a row twice).
In `MixedOrder`, after any number t of rows, a source with share w of the weights has given
floor(w t) or ceil(w t) of them; each source is visited in one permutation after the other.
`BandedOrder` visits the open rows in one permutation after the other and restarts when a band
opens; from the last opening on, every epoch holds every row once.
PCG64's raw stream, which numpy guarantees never to change, gives the permutations.
A field out of range, or a negative step of `batch`, raises `ValueError`.
Does not promise: that the sources of a mixture end together; a small one with a large weight
repeats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, lcm
from typing import Any

import numpy as np

from engines.config.data import OrderConfig
from infra.errors import ConfigError

MAX_PERIOD = 2**20
"""Longest period of the pattern of sources, in rows; it takes a second or two to compute."""


@dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """A seeded, endless visiting order over rows; a pure function of the fields and the step."""

    batch_size: int
    seed: int

    def batch(self, step: int) -> list[int]:
        """Return the `batch_size` row indices of a 0-based step, in visiting order."""
        if step < 0:
            raise ValueError(f"step: got {step}; need >= 0")
        return self.rows(step).tolist()

    @abstractmethod
    def rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step, (batch_size,) int64."""

    @abstractmethod
    def epoch(self, step: int) -> float:
        """Return the number of passes over the rows before a step, fractions included."""


@dataclass(frozen=True)
class VisitedRow:
    """The properties of a row that an order may use; only RL rows have `extra_info`."""

    data_source: str
    num_tokens: int
    extra_info: Mapping[str, Any]


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
    shuffled = ResumableOrder(num_rows=len(rows), batch_size=batch_size, seed=seed)
    if config.kind == "shuffled":
        return shuffled
    difficulty = tuple(_difficulty(row, place, config, path) for place, row in enumerate(rows))
    if config.kind == "ascending":
        return replace(shuffled, difficulty=difficulty)
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
) -> "MixedOrder":
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
        return MixedOrder(
            groups=tuple(map(tuple, groups.values())),
            weights=tuple(config.weights[source] for source in groups),
            batch_size=batch_size,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(f"{path}.weights", str(error).removeprefix("weights: ")) from None


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


@dataclass(frozen=True, kw_only=True)
class ResumableOrder(Order):
    """Visits `num_rows` rows in one permutation after the other.

    With `difficulty`, which has one finite number per row, every epoch goes from easy rows to
    difficult ones; rows of equal difficulty are in seeded order.
    """

    num_rows: int
    difficulty: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_order(self.num_rows, self.batch_size, self.seed, self.difficulty or ())

    def rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step."""
        return self.visits(step * self.batch_size, self.batch_size)

    def visits(self, first: int, count: int) -> np.ndarray:
        """Return `count` rows from visit number `first` (0-based) of the stream, (count,) int64."""
        pieces = [np.empty(0, dtype=np.int64)]
        while count:
            epoch, offset = divmod(first, self.num_rows)
            piece = self._epoch_rows(epoch)[offset : offset + count]
            pieces.append(piece)
            first, count = first + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def epoch(self, step: int) -> float:
        """Return the number of epochs before a step, fractions included."""
        return step * self.batch_size / self.num_rows

    @cached_property
    def _epoch_rows(self) -> Callable[[int], np.ndarray]:
        @lru_cache(maxsize=2)  # a batch may span two epochs
        def epoch_rows(epoch: int) -> np.ndarray:
            rows = permutation(self.num_rows, self.seed, epoch)
            if self.difficulty is None:
                return rows
            return rows[np.argsort(np.asarray(self.difficulty)[rows], kind="stable")]

        return epoch_rows


@dataclass(frozen=True, kw_only=True)
class MixedOrder(Order):
    """Interleaves the rows of several sources in proportion to `weights`.

    `groups` has the row indices of each source. Weights count as exact decimals; the pattern of
    sources has to repeat within `MAX_PERIOD` rows.
    """

    groups: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_order(min(map(len, self.groups), default=0), self.batch_size, self.seed)
        if len(self.weights) != len(self.groups):
            raise ValueError(f"weights: got {len(self.weights)}; need {len(self.groups)}")
        if sum(self._parts) > MAX_PERIOD:
            raise ValueError(
                f"weights: got {self.weights}, which repeat after {sum(self._parts)} rows; need at "
                f"most {MAX_PERIOD}; round them"
            )

    def rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step."""
        visited = self.visited(step)
        pattern = source_pattern(self._parts)
        start = step * self.batch_size % len(pattern)
        sources = pattern[(start + np.arange(self.batch_size)) % len(pattern)]
        rows = np.empty(self.batch_size, dtype=np.int64)
        for source, (group, order) in enumerate(self._sources):
            places = np.flatnonzero(sources == source)
            rows[places] = group[order.visits(visited[source], len(places))]
        return rows

    def visited(self, step: int) -> tuple[int, ...]:
        """Return how many rows each source gave before a step, repetitions counted."""
        pattern = source_pattern(self._parts)
        periods, rest = divmod(step * self.batch_size, len(pattern))
        counts = np.bincount(pattern[:rest], minlength=len(self._parts)).tolist()
        return tuple(
            periods * parts + count for parts, count in zip(self._parts, counts, strict=True)
        )

    def epoch(self, step: int) -> float:
        """Return the rows visited before a step divided by all rows."""
        return step * self.batch_size / sum(map(len, self.groups))

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        return whole_parts(self.weights)

    @cached_property
    def _sources(self) -> list[tuple[np.ndarray, ResumableOrder]]:
        """The row indices of each source, and the order that visits them."""
        return _orders_within(self, map(np.array, self.groups))


@dataclass(frozen=True)
class Band:
    """Rows of at most `max_difficulty`, which steps from the 0-based `first_step` on may visit."""

    max_difficulty: float
    first_step: int


@dataclass(frozen=True, kw_only=True)
class BandedOrder(Order):
    """Visits the rows of all open bands in seeded order.

    The bands rise in both fields. The first opens at step 0 and has a row; the last includes the
    most difficult row. `difficulty` has one finite number per row.
    """

    difficulty: tuple[float, ...]
    bands: tuple[Band, ...]

    def __post_init__(self) -> None:
        _check_order(len(self.difficulty), self.batch_size, self.seed, self.difficulty)
        steps = [band.first_step for band in self.bands]
        limits = [band.max_difficulty for band in self.bands]
        if steps[:1] != [0] or steps != sorted(set(steps)) or limits != sorted(set(limits)):
            raise ValueError(f"bands: got {self.bands}; need both to rise, the steps from 0")
        if limits[0] < min(self.difficulty) or limits[-1] < max(self.difficulty):
            raise ValueError(
                f"bands: got {limits[0]} to {limits[-1]}; need a row in the first and every row in "
                f"the last; difficulty is {min(self.difficulty)} to {max(self.difficulty)}"
            )

    def rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step."""
        stage = max(number for number, band in enumerate(self.bands) if band.first_step <= step)
        rows, order = self._open_rows[stage]
        return rows[order.rows(step - self.bands[stage].first_step)]

    def epoch(self, step: int) -> float:
        """Return the number of passes over the open rows before a step, fractions included."""
        ends = [*(band.first_step for band in self.bands[1:]), step]
        return sum(
            max(0, min(end, step) - band.first_step) * self.batch_size / len(rows)
            for band, end, (rows, _) in zip(self.bands, ends, self._open_rows, strict=True)
        )

    @cached_property
    def _open_rows(self) -> list[tuple[np.ndarray, ResumableOrder]]:
        """For each band, the rows open from its first step on, and the order that visits them."""
        difficulty = np.asarray(self.difficulty)
        opened = (np.flatnonzero(difficulty <= band.max_difficulty) for band in self.bands)
        return _orders_within(self, opened)


def _orders_within(
    order: Order, parts: Iterable[np.ndarray]
) -> list[tuple[np.ndarray, ResumableOrder]]:
    """Pair each part of the rows with an order of its own, over indices into the part."""
    return [
        (
            rows,
            ResumableOrder(
                num_rows=len(rows),
                batch_size=order.batch_size,
                seed=derived_seed(order.seed, number),
            ),
        )
        for number, rows in enumerate(parts)
    ]


def permutation(num_rows: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return a read-only (num_rows,) int64 permutation that depends only on the arguments."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def _check_order(
    num_rows: int, batch_size: int, seed: int, difficulty: Sequence[float] = ()
) -> None:
    if num_rows < 1 or batch_size < 1 or seed < 0:
        raise ValueError(
            f"need num_rows >= 1, batch_size >= 1, seed >= 0; got {num_rows}, {batch_size}, {seed}"
        )
    if not np.isfinite(difficulty).all():
        raise ValueError("difficulty: got a value that is not finite; need a number for each row")


def derived_seed(seed: int, part: int) -> int:
    """Return a seed for one part of an order, so that parts of equal size get different orders."""
    return int(np.random.PCG64(np.random.SeedSequence([seed, part])).random_raw())


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of `weights`; ValueError unless finite and above 0.

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
