"""Write rectangular regions of plain tensors as files that `sharded` reads.

Promises: the directory reads like one from `save_sharded`, however the tensors were cut; at most
`_MAX_FILE_BYTES`, or one larger region, are held in memory.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from engines import collectives
from engines.checkpoint.sharded import SHARDING_INFO
from engines.checkpoint.staging import StagingBuffers
from engines.checkpoint.tensor_files import write_tensors

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
