"""Weights and optimizer state of a replica, with names and shapes of the transformers module.

A checkpoint of one layout loads bit-identically under any other; main weights and moments are
float32. One rank writes each value; saving gathers one parameter of the stage at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR
from engines.checkpoint.regions import Region, save_regions, stage_regions
from engines.checkpoint.sharded import ShardedReader
from engines.checkpoint.staging import StagingBuffers
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from engines.training.backends.megatron.optimizer import Shard
from engines.training.backends.megatron.pieces import Block, Part
from engines.training.backends.megatron.replica import Replica
from engines.training.backends.transformers.adapters import (
    base_name,
    is_adapter_name,
    stored_adapter,
    wrapped_name,
)


def save_state(path: Path, replica: Replica, kept: Sequence[str]) -> None:
    """Write this rank's share. Collective.

    Raises:
        OSError: on every rank, if any rank fails to write.
    """
    tensors_dir = path / TENSORS_DIR
    tensors_dir.mkdir(exist_ok=True)
    save_regions(tensors_dir, _regions(replica, kept))


def stage_state(
    path: Path, replica: Replica, buffers: StagingBuffers, kept: Sequence[str]
) -> Callable[[], None]:
    """Copy this rank's share to the host. Collective.

    Returns a function that writes the copies from any thread; it may raise `OSError`.
    """
    tensors_dir = path / TENSORS_DIR
    tensors_dir.mkdir(exist_ok=True)
    return stage_regions(tensors_dir, _regions(replica, kept), buffers)


@torch.no_grad()
def _regions(replica: Replica, kept: Sequence[str]) -> Iterator[Region]:
    for number, part in enumerate(replica.parts):
        group = _group(replica, part)
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
        yield (
            moment_prefix(name),
            _gathered(replica, part, lambda shard, name=name: shard.state[name]),
        )


def moment_prefix(moment: str) -> str:
    """Return the name prefix of stored moments or averages."""
    return f"optimizer.{moment}."


def _gathered(replica: Replica, part: Part, pick: Callable[[Shard], Tensor]) -> Tensor:
    parameter, group = part.parameter, _group(replica, part)
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    shard = replica.optimizer.shard(parameter) if replica.optimizer is not None else None
    if shard is not None:
        whole[shard.start : shard.start + shard.main.numel()] = pick(shard).view(-1)
    if dist.get_world_size(group) > 1:
        collectives.all_reduce(whole, group)  # adds zeros: exact
    return whole.view(parameter.shape)


def _group(replica: Replica, part: Part) -> dist.ProcessGroup:
    place = replica.place
    return place.expert_replica_group if part.is_expert else place.replica_group


class StoredState:
    """Blocks of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reader = ShardedReader(path / TENSORS_DIR)

    def fill(
        self, part: Part, prefix: str, target: Tensor, merge: LoraConfig | None = None
    ) -> None:  # fmt: skip
        """Copy the stored blocks of a parameter into a tensor of its shape.

        The tensor keeps its values outside of the blocks. `merge` adds a stored adapter.

        Raises:
            CheckpointError: a weight is absent or has another shape.
        """
        for block in part.stored:
            name = base_name(block.name)
            wrapped = prefix + wrapped_name(name)
            found = wrapped if wrapped in self.reader else prefix + name
            values = self._read(found, block)
            adapter = stored_adapter(name, self.reader, merge) if merge is not None else None
            if adapter is not None:
                values = adapter.merged_into(self.reader.read(found))[block.slices]
            block.write(target, values)

    def _read(self, name: str, block: Block) -> Tensor:
        if name not in self.reader:
            raise CheckpointError(f"{self._path} holds no {name}")
        if self.reader.shape(name) != block.whole:
            raise CheckpointError(
                f"{self._path}: {name} has shape {self.reader.shape(name)}; "
                f"this model's has {block.whole}"
            )
        return self.reader.read_region(name, block.offsets, block.shape)


@torch.no_grad()
def load_weights(
    path: Path, replica: Replica, stored_lora: LoraConfig | None, *, fold: bool
) -> None:  # fmt: skip
    """Load parameters and main weights.

    `fold` merges the stored adapter into the weights and starts this engine's own anew.

    Raises:
        CheckpointError: a weight is absent or has another shape.
    """
    stored = StoredState(path)
    if fold:
        replica.start_adapters()
    for part in replica.parts:
        whole = torch.zeros(part.parameter.shape, dtype=torch.float32)
        if fold and is_adapter_name(part.name):
            whole.copy_(part.parameter)
        else:
            stored.fill(part, MODEL_PREFIX, whole, stored_lora if fold else None)
        part.parameter.copy_(whole)
        shard = _shard(replica, part)
        if shard is not None:
            shard.main.copy_(_own(whole, shard))


@torch.no_grad()
def load_moments(path: Path, replica: Replica, num_steps: int, kept: Sequence[str]) -> None:
    """Load the optimizer's state.

    Raises:
        CheckpointError: a moment is absent or has another shape.
    """
    stored = StoredState(path)
    for part in replica.parts:
        shard = _shard(replica, part)
        if shard is None:
            continue
        for name in kept:
            whole = torch.zeros(part.parameter.shape, dtype=torch.float32)
            stored.fill(part, moment_prefix(name), whole)
            shard.state[name].copy_(_own(whole, shard).view(shard.state[name].shape))
    if replica.optimizer is not None:
        replica.optimizer.continue_from(num_steps)


def _shard(replica: Replica, part: Part) -> Shard | None:
    return replica.optimizer.shard(part.parameter) if replica.optimizer is not None else None


def _own(whole: Tensor, shard: Shard) -> Tensor:
    return whole.view(-1)[shard.start : shard.start + shard.main.numel()]
