"""Merge a policy checkpoint of any backend into an ordinary Hugging Face directory.

Or take its adapter out of it.

Promises: names, shapes and values are those `save_pretrained` of the whole model would write
(tied weights once, fused experts split, an adapter merged in); every weight of the architecture
is there. No process group and no accelerator is needed.
Does not promise atomicity: the caller publishes the directory.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR, read_scalars
from engines.checkpoint.models.export import write_model
from engines.checkpoint.sharded import ShardedReader
from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.config.backends import ENGINES
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import (
    is_trained_with_adapter,
    save_peft_adapter,
)
from infra.plugins import load_row

HF_DIR = "hf"


def merge_checkpoint(policy_dir: Path, out_dir: Path, dtype: str, max_shard_bytes: int) -> None:
    """Write weights, configuration and tokenizer of a policy.

    Args:
        policy_dir: a `policy` artifact: `checkpoint/` and `hf/`.
        out_dir: created if needed; must not hold weights yet.
        dtype: of the written weights, `float32` or `bfloat16`.
        max_shard_bytes: of `write_model`.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
        ConfigError: the backend that wrote the checkpoint is not installed here.
    """
    write_model(policy_weights(policy_dir), policy_dir / HF_DIR, out_dir, dtype, max_shard_bytes)


def policy_weights(policy_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Stream the weights of a policy by hub name, an adapter merged in.

    Args:
        policy_dir: a `policy` artifact, of any backend and any number of ranks.

    Returns:
        Whole tensors on the CPU, in the order of the architecture.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
        ConfigError: the backend that wrote the checkpoint is not installed here.
    """
    return checkpoint_weights(policy_dir / CHECKPOINT_DIR, policy_dir / HF_DIR)


def checkpoint_weights(checkpoint: Path, hf_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Stream the weights of one role's checkpoint; as `policy_weights`.

    Args:
        checkpoint: what an engine saved.
        hf_dir: configuration of its model.

    Returns:
        Whole tensors on the CPU, in the order of the architecture.

    Raises:
        CheckpointError: weights are missing, superfluous or of another shape.
        ConfigError: the backend that wrote the checkpoint is not installed here.
    """
    engine_class = load_row(
        # Reading what it stored needs no library of its own.
        ENGINES.place(read_scalars(checkpoint).backend, device="cpu"),
        ENGINES.setting,
    )
    return engine_class.stored_weights(checkpoint, hf_dir)


def extract_adapter(policy_dir: Path, out_dir: Path, dtype: str) -> None:
    """Write the adapter of a policy alone, as PEFT loads it.

    It belongs to the weights that its stage began with: `model.path` when that was the first one.

    Args:
        policy_dir: a `policy` artifact whose stage trained an adapter, with any backend.
        out_dir: created if needed.
        dtype: of the written tensors, `float32` or `bfloat16`.

    Raises:
        CheckpointError: the checkpoint holds no adapter.
    """
    checkpoint = policy_dir / CHECKPOINT_DIR
    lora = read_scalars(checkpoint).lora
    if lora is None:
        raise CheckpointError(f"{checkpoint} holds no adapter: all weights were trained")
    reader = ShardedReader(checkpoint / TENSORS_DIR)
    stored = [
        name.removeprefix(MODEL_PREFIX) for name in reader.names() if name.startswith(MODEL_PREFIX)
    ]
    named = {
        name: reader.read(MODEL_PREFIX + name).to(getattr(torch, dtype))
        for name in stored
        if is_trained_with_adapter(name)
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    save_peft_adapter(out_dir, named, lora)
