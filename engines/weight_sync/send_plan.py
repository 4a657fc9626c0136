"""Plan of which rank sends which parts of the weights, and in which order.

A round is a few weights that fit a bucket, or one larger weight; a receiver assembles it before it
reads the next. No rank gets more than two buckets ahead of another, so ranks that have to gather
for a part do so together.
Promises: every weight is whole in one round; each rank's parts keep its reading order.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from engines.errors import WeightSyncError
from engines.weight_places import WeightPlace


@dataclass(frozen=True)
class Round:
    """Weights that are sent together; `parts` lists for each rank what it sends, in its order."""

    parts: tuple[tuple[WeightPlace, ...], ...]

    @cached_property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each whole weight by name."""
        return {place.name: place.whole for places in self.parts for place in places}


@dataclass(frozen=True)
class SendPlan:
    """Rounds of a transfer, in order."""

    rounds: tuple[Round, ...]

    @property
    def senders(self) -> list[int]:
        """Ranks that send anything, sorted."""
        return sorted({r for each in self.rounds for r, own in enumerate(each.parts) if own})

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        rounds = [[[astuple(place) for place in own] for own in each.parts] for each in self.rounds]
        return json.dumps(rounds)

    @classmethod
    def from_json(cls, text: str) -> "SendPlan":
        """Read the text of `to_json`."""
        return cls(
            tuple(
                Round(tuple(tuple(WeightPlace.of(*values) for values in own) for own in parts))
                for parts in json.loads(text)
            )
        )


def make_plan(
    owned: Sequence[Sequence[WeightPlace]], num_bytes: Mapping[str, int], round_bytes: int
) -> SendPlan:
    """Divide the parts of all ranks into rounds of at most `round_bytes`, or one larger weight.

    Args:
        owned: for each rank, the parts that it sends, in the order in which it reads them.
        num_bytes: size of each whole weight in the receiver's dtype.

    Raises:
        WeightSyncError: parts do not cover a weight, or ranks' reading orders contradict.
    """
    _check_cover(place for places in owned for place in places)
    groups = _inseparable([[place.name for place in places] for places in owned])
    orders = [list(dict.fromkeys(groups[place.name] for place in places)) for places in owned]
    group_bytes: dict[str, int] = {}
    for name, group in groups.items():
        group_bytes[group] = group_bytes.get(group, 0) + num_bytes[name]
    number_of: dict[str, int] = {}
    number, filled = 0, 0
    for group in _merged(orders):
        if filled and filled + group_bytes[group] > round_bytes:
            number, filled = number + 1, 0
        number_of[group] = number
        filled += group_bytes[group]
    parts = [[[] for _ in owned] for _ in range(number + 1 if number_of else 0)]
    for rank, places in enumerate(owned):
        for place in places:
            parts[number_of[groups[place.name]]][rank].append(place)
    return SendPlan(tuple(Round(tuple(tuple(own) for own in each)) for each in parts))


def _check_cover(places: Iterable[WeightPlace]) -> None:
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for place in places:
        key = (place.name, place.whole)
        found[key] = found.get(key, 0) + place.num_values
    for (name, whole), num_values in found.items():
        if num_values != math.prod(whole):
            raise WeightSyncError(
                f"{name}: the ranks hold {num_values} of its {math.prod(whole)} values"
            )


def _inseparable(orders: Sequence[Sequence[str]]) -> dict[str, str]:
    """Map each name to the first of the names that have to share its round.

    A rank that returns to a weight after others (a fused attention projection, head by head) reads
    all of them in one round.
    """
    group = {name: name for order in orders for name in order}
    changed = True
    while changed:
        changed = False
        for order in orders:
            last = {group[name]: position for position, name in enumerate(order)}
            head, end = "", -1
            for position, name in enumerate(order):
                if position > end:
                    head, end = group[name], last[group[name]]
                elif group[name] != head:
                    end = max(end, last[group[name]])
                    absorbed = group[name]
                    group = {n: head if g == absorbed else g for n, g in group.items()}
                    changed = True
    return group


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """Return one order that agrees with every given order, preferring the lowest rank."""
    position = [{name: number for number, name in enumerate(order)} for order in orders]
    at, merged = [0] * len(orders), []
    while True:
        heads = [
            order[number] for order, number in zip(orders, at, strict=True) if number < len(order)
        ]
        if not heads:
            return merged
        for name in dict.fromkeys(heads):
            if all(
                places.get(name, here) == here for places, here in zip(position, at, strict=True)
            ):
                break
        else:
            raise WeightSyncError(
                f"ranks read weights in orders that contradict each other: {', '.join(heads[:4])}"
            )
        merged.append(name)
        for rank, places in enumerate(position):
            at[rank] += name in places
