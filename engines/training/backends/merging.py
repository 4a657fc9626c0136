"""Reads weights of checkpoints with their adapter merged in, and writes Hugging Face directories.

An engine that starts anew from a checkpoint of an adapter needs its sum with the frozen weights.

Promises: merged names, shapes and values are those that `save_pretrained` would write. Merging and
extracting need no process group and no accelerator.
Does not promise atomic writes: the caller publishes the directory.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR, read_scalars
from engines.checkpoint.export import write_model
from engines.checkpoint.hub_names import HubNames, named_state
from engines.checkpoint.sharded import ShardedReader, load_sharded
from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.config.backends import ENGINES
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import (
    assign,
    base_name,
    initialize_adapter,
    is_adapter_name,
    is_trained_with_adapter,
    save_peft_adapter,
    stored_adapter,
    whole_tensor,
    wrapped_name,
)
from engines.training.backends.transformers.build import build_on_meta
from engines.training.spec import VALUE_HEAD, EngineSpec
from infra.plugins import load_row

HF_DIR = "hf"


def merge_checkpoint(policy_dir: Path, out_dir: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write weights (`float32` or `bfloat16`), configuration and tokenizer of a `policy` artifact.

    `out_dir` must not hold weights yet.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
        ConfigError: the backend that wrote the checkpoint is not installed here.
    """
    write_model(policy_weights(policy_dir), policy_dir / HF_DIR, out_dir, dtype, max_shard_bytes)


def policy_weights(policy_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Stream the weights of a `policy` artifact, like `checkpoint_weights`."""
    return checkpoint_weights(policy_dir / CHECKPOINT_DIR, policy_dir / HF_DIR)


def checkpoint_weights(checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Stream a checkpoint's whole weights by hub name on the CPU, an adapter merged in.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
        ConfigError: the backend that wrote the checkpoint is not installed here.
    """
    # Reading a checkpoint needs no accelerator.
    row = ENGINES.place(read_scalars(checkpoint).backend, device="cpu")
    return load_row(row, ENGINES.setting).stored_weights(checkpoint, hf_dir)


def extract_adapter(policy_dir: Path, out_dir: Path, dtype: str) -> None:
    """Write the adapter of a `policy` artifact (`float32` or `bfloat16`), as PEFT loads it.

    It applies to the weights that its stage started from: `model.path` in the first stage.

    Raises:
        CheckpointError: the checkpoint holds no adapter.
    """
    checkpoint = policy_dir / CHECKPOINT_DIR
    lora = read_scalars(checkpoint).lora
    if lora is None:
        raise CheckpointError(f"{checkpoint} holds no adapter: all weights were trained")
    reader = ShardedReader(checkpoint / TENSORS_DIR)
    named = {
        name.removeprefix(MODEL_PREFIX): reader.read(name).to(getattr(torch, dtype))
        for name in reader.names()
        if name.startswith(MODEL_PREFIX)
        and is_trained_with_adapter(name.removeprefix(MODEL_PREFIX))
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    save_peft_adapter(out_dir, named, lora)


@torch.no_grad()
def load_folded(path: Path, named: Mapping[str, Tensor], spec: EngineSpec) -> int:
    """Fill weights from a checkpoint with its adapter merged in; return its step. Collective.

    Raises:
        CheckpointError: a tensor is absent or has another shape.
    """
    scalars, reader = read_scalars(path), ShardedReader(path / TENSORS_DIR)
    own = {base_name(name): tensor for name, tensor in named.items() if not is_adapter_name(name)}
    wanted: dict[str, Tensor] = {}
    for name, tensor in own.items():
        plain, wrapped = MODEL_PREFIX + name, MODEL_PREFIX + wrapped_name(name)
        wanted[plain if plain in reader or wrapped not in reader else wrapped] = tensor
    load_sharded(path / TENSORS_DIR, wanted)
    if scalars.lora is not None:
        if not any(map(is_adapter_name, reader.names())):
            raise CheckpointError(f"{path} says it holds an adapter, but there is none in it")
        for name, tensor in own.items():
            adapter = stored_adapter(name, reader, scalars.lora)
            if adapter is not None:
                assign(tensor, adapter.merged_into(whole_tensor(tensor)))
    if spec.training.lora is not None and spec.optimizer is not None:
        initialize_adapter(named, spec.seed)
    return scalars.step


def stored_weights(checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
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

    def whole(name: str) -> Tensor:
        tensor = reader.read(MODEL_PREFIX + names[name])
        adapter = stored_adapter(name, reader, lora) if lora else None
        return tensor if adapter is None else adapter.merged_into(tensor)

    yield from HubNames(model).stream((name, whole(name)) for name in expected)
