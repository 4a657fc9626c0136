"""Weights and optimizer state of a replica, with names and shapes of the transformers module.

A checkpoint of one layout loads bit-identically under any other; main weights and moments are
float32. One rank writes each value; saving gathers one parameter of the stage at a time.

Write rectangular regions of plain tensors as files that `sharded` reads.

Promises: the directory reads like one from `save_sharded`, however the tensors were cut; at most
`_MAX_FILE_BYTES`, or one larger region, are held in memory.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.engine_state import MODEL_PREFIX, TENSORS_DIR
from engines.checkpoint.sharded import SHARDING_INFO, ShardedReader
from engines.checkpoint.tensor_files import write_tensors
from engines.config.training import LoraConfig
from engines.errors import CheckpointError
from engines.training.backends.megatron.optimizer import Shard
from engines.training.backends.megatron.param_mapping import Block, Part
from engines.training.backends.megatron.replica import Replica
from engines.training.backends.transformers.adapters import (
    base_name,
    is_adapter_name,
    stored_adapter,
    wrapped_name,
)

_MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Region:
    """The part of the tensor `name` that begins at `offsets`, for backends without DTensors."""

    name: str
    offsets: tuple[int, ...]
    values: Tensor


def save_regions(path: Path, regions: Iterable[Region]) -> None:
    """Write this rank's regions as they come; every rank calls it.

    No two ranks have the same region. `regions` is iterated to the end, because producing them may
    use collectives. Raises `OSError` on every rank, if the disk of one is full or fails.
    """
    writer = _RegionWriter(path, collectives.rank())
    problem: OSError | None = None
    for region in regions:
        if problem is None:
            values = region.values.detach().to("cpu", copy=True).contiguous()
            try:
                writer.add(replace(region, values=values))
            except OSError as error:
                problem = error
    if problem is None:
        try:
            writer.flush()
        except OSError as error:
            problem = error
    collectives.raise_together(problem, f"cannot save {path}")


def stage_regions(
    path: Path, regions: Iterable[Region], buffers: StagingBuffers
) -> Callable[[], None]:
    """Copy this rank's regions to the host and return a function that writes them.

    Every rank calls it; the tensors may change afterwards. The returned function may run on any
    thread: it uses no collective, raises `OSError`, and gives the buffers back.
    """
    staged = [
        replace(region, values=buffers.copy((region.name, region.offsets), region.values.detach()))
        for region in regions
    ]
    rank = collectives.rank()

    def write() -> None:
        writer = _RegionWriter(path, rank)
        for region in staged:
            writer.add(region)
        writer.flush()
        for region in staged:
            buffers.give_back((region.name, region.offsets), region.values)
        staged.clear()

    return write


class _RegionWriter:
    """Collects regions and writes them to files in which no name occurs twice."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._files: list[dict[str, Region]] = []
        self._num_written = 0
        self._size_bytes = 0

    def add(self, region: Region) -> None:
        """Add a region, contiguous on the CPU; a full file is written first."""
        size = region.values.numel() * region.values.element_size()
        if self._size_bytes and self._size_bytes + size > _MAX_FILE_BYTES:
            self.flush()
        free = next((file for file in self._files if region.name not in file), None)
        if free is None:
            free = {}
            self._files.append(free)
        free[region.name] = region
        self._size_bytes += size

    def flush(self) -> None:
        """Write the held regions."""
        for file in self._files:
            offsets = {name: {"saved_offsets": list(r.offsets)} for name, r in file.items()}
            name = f"shard-{self._rank:05d}-{self._num_written:05d}.safetensors"
            info = json.dumps(offsets, sort_keys=True)
            tensors = {name: file[name].values for name in sorted(file)}
            write_tensors(tensors, self._path / name, {SHARDING_INFO: info})
            self._num_written += 1
        self._files, self._size_bytes = [], 0


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
