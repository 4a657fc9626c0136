"""Which parts of the hub's weights lie in a rank's part of a transformers module."""

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
"""Name of a parameter in memory -> names on the hub, and where in it each lies."""


def slots_by_parameter(model: PreTrainedModel) -> SlotsByParameter:
    """What lies in each parameter.

    Args:
        model: the architecture; may be without memory.

    Returns:
        For each parameter.

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
    """This rank's parts of the weights, adapters merged in.

    Args:
        named: parameters and persistent buffers by name, maybe sharded.
        slots: of the architecture.
        scaling: of an adapter, alpha / rank.

    Yields:
        HeldPart: in the order of `named`; empty ones too.

    Raises:
        EngineError: a weight of the hub lies on both sides of a cut.
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
