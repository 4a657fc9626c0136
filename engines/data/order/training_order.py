"""The order in which a stage visits its rows, as its section `order` configures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.config.data import OrderConfig
from engines.data.order.curriculum import AscendingOrder, Band, BandedOrder
from engines.data.order.mixing import MixedOrder
from engines.data.order.resumable import Order, ResumableOrder
from infra.errors import ConfigError


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
        config: valid by `engines.config.rules.order.check_order`.
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
