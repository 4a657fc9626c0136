"""Reads the weights of a transformers module slice by slice from a model directory.

Missing weights are an error; `unexpected_names` finds additional ones.
"""

from collections.abc import Mapping, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from engines.checkpoint.hub_names import named_state
from engines.checkpoint.model_directory import stored_tensor_names
from engines.checkpoint.sharded import load_sharded
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import base_name
from engines.training.spec import VALUE_HEAD
from infra.errors import ConfigError


def unexpected_names(model: PreTrainedModel, stored: Set[str]) -> set[str]:
    """Return the stored names that the architecture lacks, as `from_pretrained` does."""
    held = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    # The two fields that it reads; the others differ between releases.
    info: Any = SimpleNamespace(
        missing_keys=set(),
        unexpected_keys=set(stored - revert_weight_conversion(model, held).keys()),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info.unexpected_keys


def disk_names_of(model: PreTrainedModel, hf_dir: Path) -> dict[str, str] | None:
    """Map names in memory to names on disk; None if files differ by more than names.

    The head of a value model is included only if it is on disk.
    """
    stored = set(stored_tensor_names(hf_dir))
    held = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in named_state(model)
    }
    names = {id(tensor): name for name, tensor in held.items()}
    # A tensor that is only renamed is returned as the same object.
    found = {
        names.get(id(tensor)): on_disk
        for on_disk, tensor in revert_weight_conversion(model, dict(held)).items()
    }
    if found.keys() != held.keys():
        return None
    renamed = {
        name: on_disk
        for name, on_disk in found.items()
        if name is not None and (on_disk in stored or not name.startswith(VALUE_HEAD))
    }
    return renamed if set(renamed.values()) <= stored else None


def load_slices(model: PreTrainedModel, hf_dir: Path, disk_names: Mapping[str, str]) -> None:
    """Fill this rank's part of a model by `disk_names_of`; a head that is absent becomes 0.

    Raises:
        ConfigError: the directory holds no such weights.
    """
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in named_state(model):
        if base_name(name) in disk_names:
            wanted[disk_names[base_name(name)]] = tensor
        elif name.startswith(VALUE_HEAD):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.detach().zero_()
    load_hub_weights(hf_dir, wanted)


def load_hub_weights(hf_dir: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, sharded or not and named as on the hub, from a model directory.

    Raises:
        ConfigError: the directory holds no such weights.
    """
    try:
        load_sharded(hf_dir, tensors)
    except CheckpointError as error:
        raise ConfigError("model.path", f"does not fit its own config: {error}") from error
