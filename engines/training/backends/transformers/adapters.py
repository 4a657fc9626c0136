"""Low-rank adapters (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353) by PEFT, sharded or not.

Promises: the first weights of an adapter depend on the seed and the names alone, not on the
number of ranks, and leave the model's output as it was; merged weights are
W + alpha / rank * B @ A, with DoRA rescaled row by row to the trained magnitude.
Names: PEFT hides a wrapped weight under `base_layer`; `base_name` undoes that.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from engines.checkpoint.engine_state import MODEL_PREFIX
from engines.checkpoint.peft_adapter import write_peft_adapter
from engines.config.training import LoraConfig
from engines.training.spec import VALUE_HEAD
from infra.errors import ConfigError

_ADAPTER = "default"
_BASE = ".base_layer."
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_MAGNITUDE = f".lora_magnitude_vector.{_ADAPTER}.weight"
_SETTING = "training.lora"
_NESTED = ".language_model."
"""In the names of a model that is more than a language model."""


class TensorReader(Protocol):
    """Whole tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        ...


def add_adapter(model: PreTrainedModel, lora: LoraConfig, *, inside: str = "") -> None:
    """Wrap the target modules; afterwards the adapter is trained, and a value head is.

    That head starts at 0: frozen, it would let no gradient through.

    Args:
        model: may be without memory.
        lora: shape of the adapter.
        inside: only modules whose names begin with this: the language model of one that sees,
            whose vision tower has modules of the same names, some of them convolutions.

    Raises:
        ConfigError: PEFT is not installed, or a target is in no layer.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            _SETTING, f"needs the package peft ({error}); pip install peft"
        ) from error
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),
        target_modules=_pattern(inside, _targets(model, lora, inside)),
        use_dora=lora.use_dora,
        lora_dropout=0.0,
    )
    # Values come from `initialize_adapter`; DoRA's own start would read weights that are not there.
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    like = next(model.parameters())
    for name, module in model.named_modules():
        for child, parameter in list(module.named_parameters(recurse=False)):
            if ".lora_" in f".{name}." and parameter.device != like.device:
                empty = torch.empty_like(parameter, device=like.device)
                setattr(module, child, nn.Parameter(empty))
    for name, parameter in model.named_parameters():
        if name.startswith(VALUE_HEAD):
            parameter.requires_grad_(True)


def _pattern(inside: str, modules: list[str]) -> list[str] | str:
    """PEFT's form of the target modules: last parts of names, or one pattern of whole names."""
    if not inside:
        return modules
    return rf"{re.escape(inside)}.*\.({'|'.join(re.escape(name) for name in modules)})"


def _targets(model: PreTrainedModel, lora: LoraConfig, inside: str) -> list[str]:
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and not f"{name}.".startswith(VALUE_HEAD)
        and name.startswith(inside)
    }
    if lora.target_modules == "all-linear":
        return sorted(linear)
    unknown = sorted(set(lora.target_modules) - linear)
    if unknown:
        raise ConfigError(
            f"{_SETTING}.target_modules",
            f"got {', '.join(unknown)}; need some of {', '.join(sorted(linear))}",
        )
    return sorted(lora.target_modules)


@torch.no_grad()
def initialize_adapter(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Give an adapter its first values: A uniform, B zero, magnitudes those of the weights.

    Args:
        parameters: of the model by name; may be DTensors.
        seed: of A, together with each parameter's name.
    """
    for name, parameter in parameters.items():
        if name.endswith(_A):
            assign(parameter, _uniform(name, parameter.shape, seed))
        elif name.endswith(_B):
            assign(parameter, torch.zeros(parameter.shape))
        elif name.endswith(_MAGNITUDE):
            weight = parameters[name.removesuffix(_MAGNITUDE) + f"{_BASE}weight"]
            assign(parameter, whole_tensor(weight).norm(dim=1))


def _uniform(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Kaiming's uniform start with a = sqrt(5): bound 1 / sqrt(inputs)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def assign(parameter: Tensor, values: Tensor) -> None:
    """Write whole values, the same on every rank, into a parameter that may be sharded."""
    values = values.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        # Every rank has the same values; none needs to be sent.
        placed = distribute_tensor(
            values, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(placed.to_local())
    else:
        parameter.copy_(values)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor, gathered when it is sharded. Collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def base_name(name: str) -> str:
    """Name of a parameter in the model without an adapter; the adapter's own stay."""
    return name.replace(_BASE, ".")


def wrapped_name(name: str) -> str:
    """Name of a weight once an adapter stands beside it; the inverse of `base_name`."""
    stem, _, last = name.rpartition(".")
    return f"{stem}{_BASE}{last}"


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((_A, _B, _MAGNITUDE))


def is_trained_with_adapter(name: str) -> bool:
    """Whether a parameter is trained where an adapter is: the adapter's, and a value head's."""
    return is_adapter_name(name) or name.startswith(VALUE_HEAD)


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter of one weight, whole.

    Attributes:
        a: (rank, in).
        b: (out, rank).
        scaling: alpha / rank.
        magnitude: (out,) of DoRA, or None.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    def merged_into(self, weight: Tensor) -> Tensor:
        """W + scaling * B @ A; with DoRA each row is rescaled to its magnitude (its eq. 5).

        Args:
            weight: (out, in).

        Returns:
            (out, in) float32.
        """
        device = weight.device
        merged = self.b.to(device).float() @ self.a.to(device).float()
        merged *= self.scaling  # in place: the sum takes the memory of the product
        merged += weight
        if self.magnitude is not None:
            merged *= (self.magnitude.to(device).float() / merged.norm(dim=1))[:, None]
        return merged


def stored_adapter(name: str, reader: TensorReader, lora: LoraConfig) -> StoredAdapter | None:
    """The adapter that a checkpoint holds for a weight.

    Args:
        name: of the weight, without an adapter.
        reader: of the checkpoint.
        lora: shape of the stored adapter.

    Returns:
        None when there is none for that weight.
    """
    stem, _, last = name.rpartition(".")
    a, b, magnitude = (MODEL_PREFIX + stem + part for part in (_A, _B, _MAGNITUDE))
    if last != "weight" or a not in reader:
        return None
    return StoredAdapter(
        reader.read(a),
        reader.read(b),
        lora.alpha / lora.rank,
        reader.read(magnitude) if magnitude in reader else None,
    )


def merged_state(
    named: Mapping[str, Tensor], scaling: float
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Stream a model's tensors with the adapter merged into the weights it stands beside.

    Args:
        named: parameters and buffers by name, those of the adapter among them; DTensors are
            gathered one by one, so every rank must walk the stream.
        scaling: alpha / rank.

    Yields:
        tuple[str, Tensor]: name without the adapter, and whole tensor.
    """
    for name in named:
        if is_adapter_name(name):
            continue
        yield base_name(name), merged_weight(name, named, scaling)


def frozen_state(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As `merged_state`, without the adapter."""
    for name, tensor in named.items():
        if not is_adapter_name(name):
            yield base_name(name), whole_tensor(tensor)


def adapter_state(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stream an adapter's low-rank pairs.

    Args:
        named: as for `merged_state`.

    Yields:
        tuple[str, Tensor]: module and `lora_A.weight` or `lora_B.weight`, and whole tensor.
    """
    for name, tensor in named.items():
        if name.endswith((_A, _B)):
            yield name.replace(f".{_ADAPTER}.", "."), whole_tensor(tensor)


def has_adapter(name: str) -> bool:
    """Whether an adapter stands beside the parameter of that name in the model."""
    return name.endswith(f"{_BASE}weight")


@torch.no_grad()
def merged_weight(name: str, named: Mapping[str, Tensor], scaling: float) -> Tensor:
    """One whole tensor, with its adapter merged in if it has one; see `merged_state`."""
    whole = whole_tensor(named[name])
    if not has_adapter(name):
        return whole
    stem, _, _ = name.rpartition(_BASE)
    magnitude = named.get(stem + _MAGNITUDE)
    adapter = StoredAdapter(
        whole_tensor(named[stem + _A]),
        whole_tensor(named[stem + _B]),
        scaling,
        None if magnitude is None else whole_tensor(magnitude),
    )
    return adapter.merged_into(whole)


def set_adapter_enabled(model: nn.Module, enabled: bool) -> None:
    """Whether forward passes go through the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            # Not enable_adapters(): that also switches requires_grad of the parameters.
            module._disable_adapters = not enabled


def save_peft_adapter(path: Path, named: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write an adapter as PEFT loads it: `adapter_model.safetensors`, `adapter_config.json`.

    Args:
        path: an existing directory.
        named: the adapter's whole tensors by name in the model, and a value model's head.
        lora: its shape.
    """
    tensors = {
        name.replace(f".{_ADAPTER}.", ".").replace(
            ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
        ): tensor.detach().cpu().contiguous()
        for name, tensor in named.items()
    }  # fmt: skip
    adapted = [name for name in named if is_adapter_name(name)]
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapted})
    before, nested, _ = adapted[0].partition(_NESTED)
    heads = sorted({name.partition(".")[0] for name in named if name.startswith(VALUE_HEAD)})
    targets = _pattern(before + nested, modules) if nested else modules
    write_peft_adapter(path, tensors, lora, targets, heads)
