"""Weights of a transformers module read slice by slice from a model directory.

Promises: each rank reads only its slices; what the files lack or hold in another shape is an error.
What they hold beyond is ignored here: `unexpected_names` tells of it.
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
    """What an architecture has no place for, as `from_pretrained` would tell.

    Args:
        model: the architecture, without memory.
        stored: names on disk.

    Returns:
        Those of them that are no weight or buffer, tied ones under each of their names, and that
        transformers does not know as left over from other releases.
    """
    held = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    # The two fields of its own record that it reads; what else that has differs by release.
    info: Any = SimpleNamespace(
        missing_keys=set(),
        unexpected_keys=set(stored - revert_weight_conversion(model, held).keys()),
    )
    model._adjust_missing_and_unexpected_keys(info)
    return info.unexpected_keys


def disk_names_of(model: PreTrainedModel, hf_dir: Path) -> dict[str, str] | None:
    """Name in memory -> name on disk of each weight; None where files hold more than renamed ones.

    The head of a value model is among them only when it is on disk.

    Args:
        model: without memory.
        hf_dir: the model directory.

    Returns:
        The names.
    """
    stored = set(stored_tensor_names(hf_dir))
    held = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in named_state(model)
    }
    names = {id(tensor): name for name, tensor in held.items()}
    # A tensor that is only renamed comes back as the same object.
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
    """Fill a model, or this rank's part of it, from a model directory.

    Args:
        model: sharded or not; overwritten. A head that is not on disk becomes 0.
        hf_dir: the model directory.
        disk_names: as of `disk_names_of`.

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
    """Fill tensors, named as on the hub, from a model directory.

    Args:
        hf_dir: the model directory.
        tensors: sharded or not; overwritten.

    Raises:
        ConfigError: the directory holds no such weights.
    """
    try:
        load_sharded(hf_dir, tensors)
    except CheckpointError as error:
        raise ConfigError("model.path", f"does not fit its own config: {error}") from error
