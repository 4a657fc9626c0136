"""Low-rank adapters (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353) by PEFT, sharded or not.

An adapter's initial weights depend on the seed and names (DoRA's magnitudes: on the weights) and
leave the model's output unchanged. PEFT adds `base_layer` to the name of a wrapped weight.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from engines.checkpoint.engine_state import MODEL_PREFIX
from engines.checkpoint.peft_adapter import write_peft_adapter
from engines.checkpoint.sharded import ShardedReader
from engines.collectives import whole_tensor
from engines.config.training import LoraConfig
from engines.training.spec import VALUE_HEAD
from infra.errors import ConfigError

_ADAPTER = "default"
_BASE = ".base_layer."
_A, _B = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
_MAGNITUDE = f".lora_magnitude_vector.{_ADAPTER}.weight"
_SETTING = "training.lora"
_NESTED = ".language_model."
"""Part of the names in a model that contains a language model."""


def add_adapter(model: PreTrainedModel, lora: LoraConfig, *, inside: str = "") -> None:
    """Wrap the target modules; only the adapter, and a value head, are trained then.

    A value head starts at 0: frozen, it would pass no gradient. `inside` is the name prefix of
    the language model; a vision tower has modules of the same names.

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
    # `initialize_adapter` sets the values; DoRA's own initialization would read absent weights.
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
    wanted = linear if lora.target_modules == "all-linear" else lora.target_modules
    unknown = sorted(set(wanted) - linear)
    if unknown:
        raise ConfigError(
            f"{_SETTING}.target_modules",
            f"got {', '.join(unknown)}; need some of {', '.join(sorted(linear))}",
        )
    return sorted(wanted)


@torch.no_grad()
def initialize_adapter(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Initialize an adapter by seed and name: A uniform, B zero, magnitudes of the weights."""
    for name, parameter in parameters.items():
        if name.endswith(_A):
            assign(parameter, _uniform(name, parameter.shape, seed))
        elif name.endswith(_B):
            assign(parameter, torch.zeros(parameter.shape))
        elif name.endswith(_MAGNITUDE):
            weight = parameters[name.removesuffix(_MAGNITUDE) + f"{_BASE}weight"]
            assign(parameter, whole_tensor(weight).float().norm(dim=1))


def _uniform(name: str, shape: torch.Size, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def assign(parameter: Tensor, values: Tensor) -> None:
    """Write whole values, the same on every rank, into a parameter that may be sharded."""
    values = values.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        placed = distribute_tensor(
            values, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(placed.to_local())
    else:
        parameter.copy_(values)


def base_name(name: str) -> str:
    """Return a parameter's name in the model without an adapter."""
    return name.replace(_BASE, ".")


def wrapped_name(name: str) -> str:
    """Return a weight's name in the model with an adapter; inverse of `base_name`."""
    stem, _, last = name.rpartition(".")
    return f"{stem}{_BASE}{last}"


def is_adapter_name(name: str) -> bool:
    """True if a parameter belongs to an adapter."""
    return name.endswith((_A, _B, _MAGNITUDE))


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter of one weight: `a` (rank, in), `b` (out, rank), DoRA's magnitude (out,)."""

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None

    def merged_into(self, weight: Tensor) -> Tensor:
        """Return W + scaling * B @ A in float32; DoRA rescales its rows (eq. 5)."""
        device = weight.device
        merged = self.b.to(device).float() @ self.a.to(device).float()
        merged *= self.scaling  # in place: the sum reuses the memory of the product
        merged += weight
        if self.magnitude is not None:
            merged *= (self.magnitude.to(device).float() / merged.norm(dim=1))[:, None]
        return merged


def stored_adapter(name: str, reader: ShardedReader, lora: LoraConfig) -> StoredAdapter | None:
    """Return a checkpoint's adapter of the weight `name`; None for a weight without an adapter."""
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


def adapter_state(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Stream an adapter's whole `lora_A.weight` and `lora_B.weight`. Collective for DTensors."""
    for name, tensor in named.items():
        if name.endswith((_A, _B)):
            yield name.replace(f".{_ADAPTER}.", "."), whole_tensor(tensor)


def has_adapter(name: str) -> bool:
    """True if the parameter of that name has an adapter."""
    return name.endswith(f"{_BASE}weight")


@torch.no_grad()
def merged_weight(name: str, named: Mapping[str, Tensor], scaling: float) -> Tensor:
    """Return one whole tensor, with its adapter merged in if it has one."""
    whole = whole_tensor(named[name])
    if not has_adapter(name):
        return whole
    stem = name.rpartition(_BASE)[0]
    parts = {
        part: whole_tensor(named[stem + part])
        for part in (_A, _B, _MAGNITUDE)
        if stem + part in named
    }
    return StoredAdapter(parts[_A], parts[_B], scaling, parts.get(_MAGNITUDE)).merged_into(whole)


def merged_weights(named: Mapping[str, Tensor], scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Stream whole weights, adapters merged in, by their names in the model without an adapter."""
    for name in named:
        if not is_adapter_name(name):
            yield base_name(name), merged_weight(name, named, scaling)


def save_peft_adapter(path: Path, named: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write the whole tensors of an adapter, and of a value head, in PEFT's format."""
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
