"""The hub weights in a rank's shard of a transformers module."""

from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedModel

from engines.checkpoint.hub_names import Slot, hub_slots
from engines.training.backends.transformers.adapters import (
    base_name,
    has_adapter,
    is_adapter_name,
    merged_weight,
)
from engines.training.weight_shards import (
    HeldPart,
    local_place,
    local_values,
    parts_in_slots,
)

SlotsByParameter = Mapping[str, list[tuple[str, Slot]]]
"""Parameter name in memory -> hub names, and where in it each weight lies."""


def slots_by_parameter(model: PreTrainedModel) -> SlotsByParameter:
    """Return the hub weights in each parameter of a model.

    Raises:
        ConfigError: a weight on the hub is no regular part of one parameter.
    """
    found: dict[str, list[tuple[str, Slot]]] = {}
    for hub_name, slot in hub_slots(model).items():
        found.setdefault(slot.parameter, []).append((hub_name, slot))
    return found


def held_parts(
    named: Mapping[str, Tensor], slots: SlotsByParameter, scaling: float
) -> Iterator[HeldPart]:
    """Yield this rank's parts of the weights, adapters merged in; some may be empty.

    Raises:
        EngineError: a shard boundary cuts through a hub weight.
    """
    for name, tensor in named.items():
        if is_adapter_name(name):
            continue
        inside = slots.get(base_name(name), [])
        if any(not slot.is_all_of(tensor) for _, slot in inside):
            yield from parts_in_slots(name, tensor, inside)
            continue
        place = local_place(inside[0][0] if inside else name, tensor)
        if has_adapter(name):
            yield HeldPart(
                place,
                lambda name=name, place=place: merged_weight(name, named, scaling)[place.slices],
            )
        else:
            yield HeldPart(place, lambda tensor=tensor: local_values(tensor))
