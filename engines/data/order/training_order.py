"""The order in which a stage visits its rows, as its section `order` asks for it.

Promises: of every kind, `batch(step)` is a pure function of configuration, rows, seed and step;
without a section of its own a stage visits its rows by `ResumableOrder`, as it is.
Does not promise: that the difficulty of a row is what the policy finds difficult.
"""

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
    """What an order may read of a row.

    Attributes:
        data_source: of the row.
        num_tokens: of its conversation or prompt.
        extra_info: of an RL row; others have none.
    """

    data_source: str
    num_tokens: int
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class GroupedOrder:
    """A mixture whose sources lie scattered among the rows.

    Attributes:
        mixture: over the rows, source by source.
        rows: the index of each of them.
    """

    mixture: MixedOrder
    rows: tuple[int, ...]

    def batch(self, step: int) -> list[int]:
        """Row indices of one step; 0-based."""
        return [self.rows[place] for place in self.mixture.batch(step)]

    def epoch(self, step: int) -> float:
        """Rows visited before a step, per row there is."""
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
    """The order that a section asks for.

    Args:
        config: the section, by the rules of `engines.config.rules.order.check_order`.
        rows: of the split, at least one.
        batch_size: rows of one batch, at least 1.
        seed: of the order.
        path: of the section, for errors (`sft.order`).
        batches_per_step: batches of one training step: a band opens at its step, not at its batch.

    Returns:
        The order, over indices into `rows`.

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
    """A number of the row; its length where the section names none."""
    if config.difficulty is None:
        return float(row.num_tokens)
    value = row.extra_info.get(config.difficulty)
    # Only finite numbers are in a row.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{path}.difficulty",
            f"got {config.difficulty}, which is {value!r:.40} in extra_info of row {place}; need a "
            "number in every row; name another key, or null for the number of tokens",
        )
    return float(value)
