"""Receives an adapter and writes it as files that the engine's library loads.

Promises: every tensor is checked for name, shape and dtype, and every pair for completeness, before
a file is written; the checksum is of the written tensors. Unknown modules are reported by the
library when it loads them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.peft_adapter import write_peft_adapter
from engines.checksum import combine, tensor_checksum
from engines.config.training import LoraConfig
from engines.errors import WeightSyncError
from engines.rollout.served.model_layout import ModelLayout
from engines.weight_sync.base import Receipt, WeightSource

_A, _B = ".lora_A.weight", ".lora_B.weight"


def receive_adapter(
    source: WeightSource, layout: ModelLayout, lora: LoraConfig, dtype: str, directory: Path
) -> Receipt:
    """Write the tensors of an adapter into an existing directory, for the library to load.

    Raises:
        WeightSyncError: a tensor is unknown, missing, repeated, or of another shape or dtype.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors():
        if name in tensors:
            raise WeightSyncError(f"{name} was sent twice")
        wanted = _shape(name, layout, lora)
        if tuple(tensor.shape) != wanted or tensor.dtype != getattr(torch, dtype):
            raise WeightSyncError(
                f"{name}: sent {tensor.dtype} {tuple(tensor.shape)}, need {dtype} {wanted}"
            )
        # Copied, since the source may reuse its memory; files are written from the CPU.
        tensors[name] = tensor.detach().to("cpu", copy=True)
    modules = {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    missing = sorted({m + end for m in modules for end in (_A, _B)} - tensors.keys())
    if missing or not modules:
        first = f", first {missing[0]}" if missing else ""
        raise WeightSyncError(f"{len(missing) or 'all'} parts of the adapter were not sent{first}")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    write_peft_adapter(directory, tensors, lora, targets)
    return _receipt(tensors)


def _shape(name: str, layout: ModelLayout, lora: LoraConfig) -> tuple[int, int]:
    module = name.removesuffix(_A).removesuffix(_B)
    shape = layout.tensors.get(f"{module}.weight", ())
    if module == name or len(shape) != 2:
        raise WeightSyncError(f"the rollout model has no weight that {name} stands beside")
    return (lora.rank, shape[1]) if name.endswith(_A) else (shape[0], lora.rank)


def _receipt(tensors: Mapping[str, Tensor]) -> Receipt:
    digest = combine((name, tensor_checksum(tensor)) for name, tensor in tensors.items())
    return Receipt(digest, len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
