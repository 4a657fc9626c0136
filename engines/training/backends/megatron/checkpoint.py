"""Weights and optimizer state of a replica as files, named and shaped as in transformers.

Promises: a checkpoint of one layout loads bit-identically under any other; main weights and moments
are float32. One rank writes each value; saving gathers one parameter of the stage at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR
from engines.checkpoint.sharded import Region, ShardedReader
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from engines.training.backends.megatron.optimizer import Shard
from engines.training.backends.megatron.param_mapping import Part
from engines.training.backends.megatron.replica import Replica
from engines.training.backends.transformers.adapters import (
    base_name,
    is_adapter_name,
    stored_adapter,
    wrapped_name,
)


@torch.no_grad()
def stored_regions(replica: Replica, kept: Sequence[str]) -> Iterator[Region]:
    """Yield what this rank stores: weights, and the optimizer's state `kept`. Collective."""
    for number, part in enumerate(replica.parts):
        group = replica.group_of(part)
        is_writer = part.is_primary and number % dist.get_world_size(group) == dist.get_rank(group)
        for prefix, values in _tensors(replica, part, kept):
            for block in part.stored if is_writer else ():
                yield Region(prefix + block.name, block.offsets, block.read(values))


def _tensors(replica: Replica, part: Part, kept: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter's weight and optimizer state, whole. Collective over its group."""
    is_trained = replica.optimizer is not None and part.parameter.requires_grad
    if not is_trained or part.parameter.dtype == torch.float32:
        yield MODEL_PREFIX, part.parameter.detach().float()
    else:
        yield MODEL_PREFIX, _gathered(replica, part, lambda shard: shard.main)
    for name in kept if is_trained else ():
        whole = _gathered(replica, part, lambda shard, name=name: shard.state[name])
        yield f"optimizer.{name}.", whole


def _gathered(replica: Replica, part: Part, pick: Callable[[Shard], Tensor]) -> Tensor:
    parameter, group, shard = part.parameter, replica.group_of(part), replica.shard(part)
    whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    if shard is not None:
        shard.of(whole).copy_(pick(shard).view(-1))
    if dist.get_world_size(group) > 1:
        collectives.all_reduce(whole, group)  # adds zeros: exact
    return whole


def _fill(
    target: Tensor,
    path: Path,
    reader: ShardedReader,
    part: Part,
    prefix: str,
    *,
    merge: LoraConfig | None = None,
) -> None:
    """Copy the stored blocks of a parameter into a tensor of its shape.

    The tensor keeps its values outside of the blocks. `merge` adds a stored adapter.

    Raises:
        CheckpointError: a weight is absent or has another shape.
    """
    for block in part.stored:
        name = base_name(block.name)
        wrapped = prefix + wrapped_name(name)
        found = wrapped if wrapped in reader else prefix + name
        if found not in reader:
            raise CheckpointError(f"{path} holds no {found}")
        if reader.shape(found) != block.whole:
            raise CheckpointError(
                f"{path}: {found} has shape {reader.shape(found)}; this model's has {block.whole}"
            )
        adapter = stored_adapter(name, reader, merge) if merge is not None else None
        if adapter is None:
            block.write(target, reader.read_region(found, block.offsets, block.shape))
        else:
            block.write(target, adapter.merged_into(reader.read(found))[block.slices])


@torch.no_grad()
def load_weights(
    path: Path, replica: Replica, stored_lora: LoraConfig | None, *, fold: bool
) -> None:  # fmt: skip
    """Load parameters and main weights.

    `fold` merges the stored adapter into the weights and starts this engine's own anew.

    Raises:
        CheckpointError: a weight is absent or has another shape.
    """
    reader = ShardedReader(path / TENSORS_DIR)
    if fold:
        replica.start_adapters()
    for part in replica.parts:
        whole = torch.zeros(part.parameter.shape, dtype=torch.float32)
        if fold and is_adapter_name(part.name):
            whole.copy_(part.parameter)
        else:
            _fill(whole, path, reader, part, MODEL_PREFIX, merge=stored_lora if fold else None)
        part.parameter.copy_(whole)
        shard = replica.shard(part)
        if shard is not None:
            shard.main.copy_(shard.of(whole))


@torch.no_grad()
def load_moments(path: Path, replica: Replica, num_steps: int, kept: Sequence[str]) -> None:
    """Load the optimizer's state.

    Raises:
        CheckpointError: a moment is absent or has another shape.
    """
    reader = ShardedReader(path / TENSORS_DIR)
    for part in replica.parts:
        shard = replica.shard(part)
        if shard is not None:
            for name in kept:
                whole = torch.zeros(part.parameter.shape, dtype=torch.float32)
                _fill(whole, path, reader, part, f"optimizer.{name}.")
                shard.state[name].copy_(shard.of(whole).view(shard.state[name].shape))
    if replica.optimizer is not None:
        replica.optimizer.continue_from(num_steps)
