"""The shards of a model's weights that a rank holds, and their places in the whole weights.

Used by weight syncs without an all-gather. The owned parts of all ranks cover every weight exactly
once; a part is a rectangle of a hub weight.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engines import collectives
from engines.checkpoint.hub_names import Slot
from engines.errors import EngineError
from engines.weight_places import WeightPlace, WeightShard, local_place, local_values


@dataclass(frozen=True)
class HeldPart:
    """A rectangle that this rank holds; `read` returns its values and may be collective."""

    place: WeightPlace
    read: Callable[[], Tensor]


def parts_in_slots(name: str, tensor: Tensor, slots: Iterable[tuple[str, Slot]]) -> list[HeldPart]:
    """Return this rank's shard of a fused parameter, as parts of the hub weights in it.

    Raises:
        EngineError: a shard boundary cuts through a weight.
    """
    place, local = local_place(name, tensor), local_values(tensor)
    row_size = local[0].numel() if local.shape[0] else 0
    start = place.offsets[0] * row_size
    end = start + local.numel()
    parts: list[HeldPart] = []
    for hub_name, slot in slots:
        last = slot.offset + sum(
            (size - 1) * step for size, step in zip(slot.size, slot.stride, strict=True)
        )
        if last < start or slot.offset >= end:
            continue
        if slot.offset < start or last >= end or place.shape[1:] != place.whole[1:]:
            raise EngineError(f"{name} is cut through {hub_name}: its parts cannot be named")
        zeros = (0,) * len(slot.size)
        view = local.contiguous().as_strided(slot.size, slot.stride, slot.offset - start)
        held = WeightPlace(hub_name, slot.size, zeros, slot.size)
        parts.append(HeldPart(held, lambda view=view: view))
    return parts


def owned_parts(parts: Iterable[HeldPart]) -> list[tuple[HeldPart, bool]]:
    """Return this rank's parts, each with True if no lower rank holds it. Collective."""
    held = list(parts)
    keys = [f"{part.place.name} {part.place.offsets}" for part in held]
    real = [key for key, part in zip(keys, held, strict=True) if 0 not in part.place.shape]
    lists = collectives.gather_values(real)
    earlier = {key for keys in lists[: collectives.rank()] for key in keys}
    owned = set(real) - earlier
    return [(part, key in owned) for key, part in zip(keys, held, strict=True)]


def stream_parts(parts: Iterable[tuple[HeldPart, bool]]) -> Iterator[WeightShard]:
    """Read parts one at a time, without gradient; empty ones are read but not yielded."""
    for part, is_owner in parts:
        if 0 in part.place.shape:
            _read(part)
        else:
            # No local name, which would keep the tensor alive while a receiver works on it.
            yield WeightShard(part.place, _read(part), is_owner)


@torch.no_grad()
def _read(part: HeldPart) -> Tensor:
    return part.read()
