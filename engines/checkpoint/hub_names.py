"""Map the names of a model's tensors in memory to those that `save_pretrained` writes.

transformers fuses or renames some tensors on load (such as the experts of a mixture); these are
converted back one by one as they stream by. Persistent buffers are included.
Promises: the streamed names are those that converting the whole state would give; an architecture
whose tensors on disk combine several from memory is refused.
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
    """Return parameters and persistent buffers by name in memory, tied ones once."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = [(name, b) for name, b in model.named_buffers() if name in persistent]
    return [*model.named_parameters(), *buffers]


def keep_float32(model: PreTrainedModel) -> None:
    """Cast to float32 the tensors that this architecture keeps in float32 at any model dtype.

    These are declared modules (`from_pretrained` casts them, `from_config` does not), and floating
    persistent buffers, because training casts only parameters.
    """
    declared = [glob.replace("*", ".*") for glob in model._keep_in_fp32_modules_strict or ()]
    parameters = dict(model.named_parameters())
    for name, tensor in named_state(model):
        is_kept = name not in parameters or any(re.search(glob, name) for glob in declared)
        if is_kept and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def float32_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names on disk of a model's float32 tensors; a meta device is fine."""
    found: set[str] = set()
    for name, tensor in named_state(model):
        if tensor.dtype == torch.float32:
            shape = torch.empty(tensor.shape, device="meta")
            found.update(revert_weight_conversion(model, {name: shape}))
    return frozenset(found)


def served_float32_names(hf_dir: Path, dtype: torch.dtype) -> frozenset[str]:
    """Return the names on disk of tensors that a rollout engine of `dtype` keeps in float32.

    Sender and receiver both compute this from `config.json`. Empty if `dtype` is float32.
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
    """Strided view (in elements) of a parameter or buffer that is one tensor on disk."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_all_of(self, parameter: Tensor) -> bool:
        """Return True if the tensor on disk is the whole parameter, unchanged."""
        same = torch.empty(parameter.shape, device="meta")
        return (self.size, self.stride) == (tuple(same.shape), same.stride())

    def view(self, parameter: Tensor) -> Tensor:
        """Return a writable view of this part of the (contiguous) parameter."""
        return parameter.detach().as_strided(
            self.size, self.stride, parameter.storage_offset() + self.offset
        )


def hub_slots(model: PreTrainedModel) -> dict[str, Slot]:
    """Return a slot for every tensor on disk, by name on disk, without allocating tensors.

    Raises `ConfigError` if one is not a strided view of a tensor in memory, or joins several.
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
            # A renamed tensor comes back as the same object. Comparing shapes would miss a
            # rearrangement, and so would digests: both sides compute them from tensors on disk.
            if part is empty:
                slots[on_disk] = Slot(name, shape, parameter.stride(), 0)
            elif part.untyped_storage()._cdata == empty.untyped_storage()._cdata:
                steps = zip(part.shape, part.stride(), strict=True)
                stride = tuple(step if size > 1 else 1 for size, step in steps)
                slots[on_disk] = Slot(name, tuple(part.shape), stride, int(part.storage_offset()))
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
    """Makes conversions of a meta tensor return views, which locate the parts without computing."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        # Tensor.view fails on a tensor that was not made contiguous.
        called = Tensor.reshape if func is Tensor.view else func
        return called(*args, **(kwargs or {}))


class HubNames:
    """Streams a model's tensors under their names on disk; `model` may be on the meta device."""

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
        """True if names and tensors on disk are those in memory."""

    def stream(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, tied ones once, under their names on disk, split where needed.

        Raises `ConfigError` if the architecture cannot be converted one tensor at a time.
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
            # Free this tensor before the next one is made.
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
