"""Sharded, reshardable state: rectangular regions of tensors in plain safetensors files.

Files are named `shard-<rank>-<part>.safetensors`, with the offsets in the header, which
torch.distributed.checkpoint reads.

Promises: no pickle; equal state at an equal world size gives equal bytes; a save at world size N
loads at world size M, and each rank reads only its slices. `save_regions` holds copies of at most
`_MAX_FILE_BYTES`, or of one larger region.
Does not promise durability or atomicity, which `step_store` provides.
torch's own `HuggingFaceStorageWriter` is not used: its header keys are stored in random order.
"""

import json
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from engines import collectives
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.tensor_files import disk_error, own_storage, write_tensors
from engines.errors import CheckpointError
from engines.weight_places import local_place, local_values

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Header key from which `HuggingFaceStorageReader` reads the offsets of a file's pieces."""
_MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True)
class Region:
    """The part of the tensor `name` that begins at `offsets`."""

    name: str
    offsets: tuple[int, ...]
    values: Tensor


def own_regions(tensors: Mapping[str, Tensor]) -> Iterator[Region]:
    """Yield the regions of tensors, sharded or not, that this rank stores, by name. Collective.

    Of the ranks that hold a region, the rank with the fewest bytes so far stores it.
    """
    own: dict[str, Region] = {}
    for name, tensor in tensors.items():
        place = local_place(name, tensor)
        if place.num_values:
            own[f"{name} {place.offsets}"] = Region(name, place.offsets, local_values(tensor))
    holders: dict[tuple[str, int], list[int]] = {}
    sizes = {key: region.values.nbytes for key, region in own.items()}
    for rank, of_rank in enumerate(collectives.gather_values(sizes)):
        for key_and_bytes in of_rank.items():
            holders.setdefault(key_and_bytes, []).append(rank)
    num_bytes_of = Counter[int]()
    for (key, num_bytes), ranks in sorted(holders.items()):
        writer = min(ranks, key=num_bytes_of.__getitem__)
        num_bytes_of[writer] += num_bytes
        if writer == collectives.rank():
            yield own[key]


def save_regions(path: Path, regions: Iterable[Region]) -> None:
    """Write this rank's regions as they come; every rank calls it.

    Ranks must have different regions. If one fails, all raise `OSError`, a lone rank its error.
    """
    together(f"cannot save {path}", partial(_write_regions, path, collectives.rank()), regions)


def together(
    what: str, work: Callable[[Iterable[Region]], None], regions: Iterable[Region] = ()
) -> None:
    """Give regions to `work`; errors are raised as by `raise_together`. Collective.

    The regions are iterated to the end, because producing them may use collectives.
    """
    waiting = iter(regions)
    problem: Exception | None = None
    try:
        work(waiting)
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        problem = error
    deque(waiting, maxlen=0)
    collectives.raise_together(problem, what)


def stage_regions(
    path: Path, regions: Iterable[Region], buffers: StagingBuffers
) -> Callable[[], None]:
    """Copy this rank's regions to the host and return a function that writes them.

    Every rank calls it; the tensors may change afterwards. The returned function may run on any
    thread: it uses no collective, may raise `OSError`, and gives the buffers back after writing.
    """
    staged: list[Region] = []
    rank = collectives.rank()

    def stage(waiting: Iterable[Region]) -> None:
        for region in waiting:
            values = buffers.copy((region.name, region.offsets), region.values.detach())
            staged.append(replace(region, values=values))

    together(f"cannot stage {path}", stage, regions)

    def write() -> None:
        _write_regions(path, rank, staged)
        for region in staged:
            buffers.give_back((region.name, region.offsets), region.values)
        staged.clear()

    return write


def _write_regions(path: Path, rank: int, regions: Iterable[Region]) -> None:
    """Write regions to files in which no name occurs twice; the host holds one file at a time."""
    path.mkdir(exist_ok=True)
    files: list[dict[str, Region]] = []
    size_bytes, parts = 0, count()

    def flush() -> None:
        nonlocal size_bytes
        while files:
            _write_file(path / f"shard-{rank:05d}-{next(parts):05d}.safetensors", files.pop(0))
        size_bytes = 0

    for region in regions:
        if size_bytes + region.values.nbytes > _MAX_FILE_BYTES:
            flush()
        if all(region.name in file for file in files):
            files.append({})
        values = own_storage(region.values.detach().cpu().contiguous())
        file = next(file for file in files if region.name not in file)
        file[region.name] = replace(region, values=values)
        size_bytes += region.values.nbytes
    flush()


def _write_file(path: Path, file: Mapping[str, Region]) -> None:
    places = {name: {"saved_offsets": list(region.offsets)} for name, region in file.items()}
    tensors = {name: file[name].values for name in sorted(file)}
    write_tensors(tensors, path, {SHARDING_INFO: json.dumps(places, sort_keys=True)})


def load_sharded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place from files of any world size; every rank calls it.

    Also reads an ordinary Hugging Face directory. Extra tensors in the files are ignored.

    Raises:
        CheckpointError: a tensor is absent, damaged or has another shape.
        OSError: a file could not be read.
    """
    reader = _Reader(str(path))
    try:
        with warnings.catch_warnings():
            # Without a process group it warns that it assumes a single process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized()
            )
    except CheckpointException as error:  # no subclass of `Exception`
        _, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _translated(path, reader.problem or cause) from error
    except (RuntimeError, ValueError, KeyError, OSError, SafetensorError) as error:
        raise _translated(path, error) from error


class _Reader(HuggingFaceStorageReader):
    """Keeps a read error, which torch would report only as files of the wrong kind."""

    problem: OSError | None = None

    def read_metadata(self) -> Metadata:
        """Read the headers of the files, and keep the error if that fails."""
        try:
            return super().read_metadata()
        except (SafetensorError, OSError, RuntimeError) as error:
            problem = disk_error(error, Path(self.path))
            self.problem = problem if isinstance(problem, OSError) else None
            raise


def _translated(path: Path, error: BaseException) -> Exception:
    """Return an error of torch or safetensors as its `OSError` cause, or a `CheckpointError`."""
    cause = disk_error(error, path)
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return cause
    return CheckpointError(f"cannot load {path}: {' '.join(str(cause).split())[:500]}")


@dataclass(frozen=True)
class _Piece:
    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedReader:
    """Reads whole tensors or regions of a `save_regions` directory without a process group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: dict[str, list[_Piece]] = {}
        files = sorted(path.glob("shard-*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no shard")
        for file in files:
            with safe_open(file, framework="pt") as shard:
                info = (shard.metadata() or {}).get(SHARDING_INFO)
                if info is None:
                    raise CheckpointError(f"{file} does not say which pieces it holds")
                places = json.loads(info)
                for name in shard.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                    shape = tuple(shard.get_slice(name).get_shape())
                    self._pieces.setdefault(name, []).append(
                        _Piece(file, tuple(places[name]["saved_offsets"]), shape)
                    )

    def names(self) -> list[str]:
        """Return the sorted names of the tensors."""
        return sorted(self._pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        ends = [
            [o + n for o, n in zip(piece.offsets, piece.shape, strict=True)]
            for piece in self._pieces[name]
        ]
        return tuple(max(column) for column in zip(*ends, strict=True))

    def read(self, name: str) -> Tensor:
        """Return the whole tensor on the CPU."""
        shape = self.shape(name)
        return self.read_region(name, (0,) * len(shape), shape)

    def read_region(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangular region of a tensor on the CPU; only that region is read."""
        part: Tensor | None = None
        filled = 0
        for piece in self._pieces[name]:
            overlap = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offsets, shape, piece.offsets, piece.shape, strict=True)
            ]
            if any(start >= end for start, end in overlap):
                continue
            source = tuple(
                slice(s - o, e - o) for (s, e), o in zip(overlap, piece.offsets, strict=True)
            )
            target = tuple(slice(s - o, e - o) for (s, e), o in zip(overlap, offsets, strict=True))
            with safe_open(piece.file, framework="pt") as shard:
                values = shard.get_slice(name)[source]
            if values.shape == tuple(shape):
                return values
            part = torch.empty(tuple(shape), dtype=values.dtype) if part is None else part
            part[target] = values
            filled += values.numel()
        if part is None or filled != part.numel():
            raise CheckpointError(f"{self._path}: pieces of {name} are missing")
        return part
