"""Names of a model's tensors in memory, and those that `save_pretrained` gives them on disk.

For most architectures they are the same. transformers fuses or renames some when it loads (the
experts of a mixture, for one); then tensors are converted back one by one as they stream by.
Promises: the streamed names are exactly those a conversion of the whole state would yield; an
architecture whose tensors on disk need several tensors from memory is refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from infra.errors import ConfigError


def named_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name in memory, tied ones once, as registered."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = [(name, b) for name, b in model.named_buffers() if name in persistent]
    return [*model.named_parameters(), *buffers]


@dataclass(frozen=True)
class Slot:
    """Where a tensor on disk lies inside a parameter in memory.

    Attributes:
        parameter: name in memory.
        size: shape on disk.
        stride: in elements of the parameter.
        offset: of the first element.
    """

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_all_of(self, parameter: Tensor) -> bool:
        """Whether the tensor on disk is the whole parameter, as it is."""
        same = torch.empty(parameter.shape, device="meta")
        return (self.size, self.stride) == (tuple(same.shape), same.stride())

    def view(self, parameter: Tensor) -> Tensor:
        """The part of the (contiguous) parameter, writable."""
        return parameter.detach().as_strided(self.size, self.stride, self.offset)


def hub_slots(model: PreTrainedModel) -> dict[str, Slot]:
    """Every tensor on disk as a part of a parameter, so that it can be written where it belongs.

    Args:
        model: with parameters of the final shapes.

    Returns:
        Slots by name on disk.

    Raises:
        ConfigError: a tensor on disk is no regular part of one parameter.
    """
    slots: dict[str, Slot] = {}
    known: dict[tuple[int, ...], Tensor] = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        converted = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
        if len(converted) == 1 and tuple(next(iter(converted.values())).shape) == shape:
            slots[next(iter(converted))] = Slot(name, shape, parameter.stride(), 0)
            continue
        # Convert the places instead of the values: they tell where each value comes from.
        if shape not in known:
            known[shape] = torch.arange(parameter.numel()).view(shape)
        for on_disk, index in revert_weight_conversion(model, {name: known[shape]}).items():
            slots[on_disk] = _regular_slot(name, index, type(model).__name__)
    return slots


def _regular_slot(parameter: str, index: Tensor, architecture: str) -> Slot:
    offset = int(index.flatten()[0])
    stride = tuple(
        int(index.select(d, 1).flatten()[0]) - offset if size > 1 else 1
        for d, size in enumerate(index.shape)
    )
    expected = torch.full((), offset)
    for d, (size, step) in enumerate(zip(index.shape, stride, strict=True)):
        steps = torch.arange(size) * step
        expected = expected + steps.view([-1 if i == d else 1 for i in range(index.dim())])
    if not torch.equal(expected, index):
        raise ConfigError(
            "model.path",
            f"{architecture} rearranges {parameter} when it is saved, which cannot be undone "
            "tensor by tensor; choose another architecture",
        )
    return Slot(parameter, tuple(index.shape), stride, offset)


class HubNames:
    """How one model's tensors are called on disk.

    Args:
        model: may be without memory, or sharded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in named_state(model)
        }
        on_disk = revert_weight_conversion(model, dict(shapes))
        self._names = set(on_disk)
        self.identical = shapes.keys() == on_disk.keys() and all(
            on_disk[name] is shapes[name] for name in shapes
        )
        """Whether names and tensors on disk are those in memory."""

    def stream(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename, and where needed split, whole tensors as they come.

        Args:
            named: (name in memory, whole tensor) of the whole model, tied ones once.

        Yields:
            tuple[str, Tensor]: name on disk, and tensor.

        Raises:
            ConfigError: this architecture cannot be converted one tensor at a time.
        """
        if self.identical:
            yield from named
            return
        streamed: set[str] = set()
        for name, tensor in named:
            converted = revert_weight_conversion(self._model, {name: tensor})
            streamed |= converted.keys()
            # Nothing is kept here beside the next one.
            del tensor
            for on_disk in list(converted):
                yield on_disk, converted.pop(on_disk)
        if streamed != self._names:
            wrong = ", ".join(sorted(streamed ^ self._names)[:3])
            raise ConfigError(
                "model.path",
                f"{type(self._model).__name__} joins tensors when it is saved ({wrong}), which "
                "cannot be streamed; choose another architecture",
            )
