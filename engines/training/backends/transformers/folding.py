"""Reads the weights of a checkpoint with its adapter merged in.

An engine that starts anew from a checkpoint of an adapter needs its sum with the frozen weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR, read_scalars
from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import ShardedReader, load_sharded
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import (
    assign,
    base_name,
    initialize_adapter,
    is_adapter_name,
    stored_adapter,
    whole_tensor,
    wrapped_name,
)
from engines.training.backends.transformers.build import build_on_meta
from engines.training.spec import VALUE_HEAD, EngineSpec


@torch.no_grad()
def load_folded(path: Path, named: Mapping[str, torch.Tensor], spec: EngineSpec) -> int:
    """Fill weights from a checkpoint with its adapter merged in; return its step. Collective.

    Raises:
        CheckpointError: a tensor is absent or has another shape.
    """
    scalars = read_scalars(path)
    reader = ShardedReader(path / TENSORS_DIR)
    stored = set(reader.names())
    own = {base_name(name): tensor for name, tensor in named.items() if not is_adapter_name(name)}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        plain, wrapped = MODEL_PREFIX + name, MODEL_PREFIX + wrapped_name(name)
        wanted[plain if plain in stored or wrapped not in stored else wrapped] = tensor
    load_sharded(path / TENSORS_DIR, wanted)
    if scalars.lora is not None:
        _add_stored_adapter(reader, own, scalars.lora, path)
    if spec.training.lora is not None and spec.optimizer is not None:
        initialize_adapter(named, spec.seed)
    return scalars.step


def _add_stored_adapter(
    reader: ShardedReader, own: dict[str, torch.Tensor], lora: LoraConfig, path: Path
) -> None:
    num_merged = 0
    for name, tensor in own.items():
        adapter = stored_adapter(name, reader, lora)
        if adapter is not None:
            assign(tensor, adapter.merged_into(whole_tensor(tensor)))
            num_merged += 1
    if num_merged == 0:
        raise CheckpointError(f"{path} says it holds an adapter, but there is none in it")


def stored_weights(checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream a checkpoint's whole weights by hub name on the CPU, without a process group.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
    """
    lora = read_scalars(checkpoint).lora
    reader = ShardedReader(checkpoint / TENSORS_DIR)
    stored = {
        name.removeprefix(MODEL_PREFIX): reader.shape(name)
        for name in reader.names()
        if name.startswith(MODEL_PREFIX)
    }
    model = build_on_meta(
        hf_dir, "value_model" if f"{VALUE_HEAD}weight" in stored else "language_model"
    )
    expected = {name: tuple(tensor.shape) for name, tensor in named_state(model)}
    held = {base_name(name): shape for name, shape in stored.items() if not is_adapter_name(name)}
    if held != expected:
        wrong = sorted(name for name, _ in held.items() ^ expected.items())
        raise CheckpointError(
            f"{checkpoint}: does not fit {hf_dir / 'config.json'} at {', '.join(wrong[:3])}"
        )
    names = {base_name(name): name for name in stored if not is_adapter_name(name)}

    def whole(name: str) -> torch.Tensor:
        tensor = reader.read(MODEL_PREFIX + names[name])
        adapter = stored_adapter(name, reader, lora) if lora else None
        return tensor if adapter is None else adapter.merged_into(tensor)

    yield from HubNames(model).stream((name, whole(name)) for name in expected)
