"""Merges a policy checkpoint of any backend into a Hugging Face directory, or extracts its adapter.

Promises: names, shapes and values are those that `save_pretrained` would write. Needs no process
group and no accelerator.
Does not promise atomic writes: the caller publishes the directory.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR, read_scalars
from engines.checkpoint.export import write_model
from engines.checkpoint.sharded import ShardedReader
from engines.checkpoint.step_store import CHECKPOINT_DIR
from engines.config.backends import ENGINES
from engines.errors import CheckpointError
from engines.training.backends.transformers.adapters import (
    is_adapter_name,
    save_peft_adapter,
)
from engines.training.spec import VALUE_HEAD, ModelSource
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


def exported_policy(policy_dir: Path, target: Path, max_shard_bytes: int = 2**30) -> ModelSource:
    """Write a `policy` artifact's merged float32 weights to `target`, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    merge_checkpoint(policy_dir, target, "float32", max_shard_bytes)
    return ModelSource(target)


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
        if name.startswith(f"{MODEL_PREFIX}{VALUE_HEAD}")
        or (name.startswith(MODEL_PREFIX) and is_adapter_name(name))
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    save_peft_adapter(out_dir, named, lora)
