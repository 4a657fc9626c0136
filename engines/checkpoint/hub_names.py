"""Names of a model's tensors in memory, and those that `save_pretrained` gives them on disk.

For most architectures they are the same. transformers fuses or renames some when it loads (the
experts of a mixture, for one); then tensors are converted back one by one as they stream by.
Promises: the streamed names are exactly those a conversion of the whole state would yield; an
architecture whose tensors on disk need several tensors from memory is refused. Tensors are
parameters and persistent buffers alike: `save_pretrained` writes both.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from engines.checkpoint.model_directory import vision_model_type
from infra.errors import ConfigError


def named_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name in memory, tied ones once, as registered."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = [(name, b) for name, b in model.named_buffers() if name in persistent]
    return [*model.named_parameters(), *buffers]


def keep_float32(model: PreTrainedModel) -> None:
    """Give float32 to what is float32 in every model of this architecture, whatever its dtype.

    What the architecture declares so, as `from_pretrained` does and `from_config` does not; and
    floating persistent buffers, because training computes with them as they are while it casts
    parameters.

    Args:
        model: may be without memory.
    """
    declared = [glob.replace("*", ".*") for glob in model._keep_in_fp32_modules_strict or ()]
    parameters = dict(model.named_parameters())
    for name, tensor in named_state(model):
        is_kept = name not in parameters or any(re.search(glob, name) for glob in declared)
        if is_kept and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def float32_names(model: PreTrainedModel) -> frozenset[str]:
    """Names on disk of what is float32 in a model.

    Args:
        model: may be without memory.

    Returns:
        The names; of a model in float32, all of them.
    """
    found: set[str] = set()
    for name, tensor in named_state(model):
        if tensor.dtype == torch.float32:
            shape = torch.empty(tensor.shape, device="meta")
            found.update(revert_weight_conversion(model, {name: shape}))
    return frozenset(found)


def served_float32_names(hf_dir: Path, dtype: torch.dtype) -> frozenset[str]:
    """What a rollout engine of this dtype holds in float32 all the same, by name on disk.

    Sender and receiver each find it from `config.json`, so nothing has to be asked for.

    Args:
        hf_dir: model directory; only its configuration is read.
        dtype: of the rollout engine.

    Returns:
        The names; none where nothing is cast at all.
    """
    if dtype == torch.float32:
        return frozenset()
    sees = vision_model_type(hf_dir) is not None
    auto_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    keep_float32(model)
    return float32_names(model)


@dataclass(frozen=True)
class Slot:
    """Where a tensor on disk lies inside a parameter or buffer in memory.

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
        offset = parameter.storage_offset() + self.offset
        return parameter.detach().as_strided(self.size, self.stride, offset)


def hub_slots(model: PreTrainedModel) -> dict[str, Slot]:
    """Every tensor on disk as a part of one in memory, so that it can be written where it belongs.

    Costs no memory, however large the tensors are.

    Args:
        model: with tensors of the final shapes.

    Returns:
        Slots by name on disk.

    Raises:
        ConfigError: a tensor on disk is no regular part of one in memory, or is joined of several.
    """
    slots: dict[str, Slot] = {}
    computed: dict[str, str] = {}  # by name on disk
    for name, parameter in named_state(model):
        shape = tuple(parameter.shape)
        empty = torch.empty(shape, device="meta")
        with _CopiesLeftOut():
            converted = revert_weight_conversion(model, {name: empty})
        if repeated := converted.keys() & (slots.keys() | computed.keys()):
            raise _joined(model, repeated)
        for on_disk, part in converted.items():
            # One that is only renamed comes back as the same object; an equal shape would not
            # tell, and neither would the digest, which both sides compute of the tensors on disk.
            if part is empty:
                slots[on_disk] = Slot(name, shape, parameter.stride(), 0)
            elif part.untyped_storage()._cdata == empty.untyped_storage()._cdata:
                slots[on_disk] = _slot_of_view(name, part)
            else:
                computed[on_disk] = name
    if computed:
        raise ConfigError(
            "model.path",
            f"{type(model).__name__} rearranges {next(iter(computed.values()))} when it is saved, "
            "which cannot be undone tensor by tensor; choose another architecture",
        )
    return slots


class _CopiesLeftOut(TorchFunctionMode):
    """Conversions of a tensor without memory leave views of it, where they would make copies.

    Their places are then known without a value: stacks of experts have billions.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        # What was not copied may not be viewed otherwise.
        called = Tensor.reshape if func is Tensor.view else func
        return called(*args, **(kwargs or {}))


def _slot_of_view(parameter: str, part: Tensor) -> Slot:
    stride = tuple(
        step if size > 1 else 1 for size, step in zip(part.shape, part.stride(), strict=True)
    )
    return Slot(parameter, tuple(part.shape), stride, int(part.storage_offset()))


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
            if repeated := streamed & converted.keys():
                raise _joined(self._model, repeated)
            streamed |= converted.keys()
            # Nothing is kept here beside the next one.
            del tensor
            for on_disk in list(converted):
                yield on_disk, converted.pop(on_disk)
        if streamed != self._names:
            raise _joined(self._model, streamed ^ self._names)


def _joined(model: PreTrainedModel, names: Iterable[str]) -> ConfigError:
    return ConfigError(
        "model.path",
        f"{type(model).__name__} joins tensors when it is saved ({', '.join(sorted(names)[:3])}), "
        "which cannot be streamed; choose another architecture",
    )
