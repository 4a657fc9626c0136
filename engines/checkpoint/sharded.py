"""Sharded, reshardable state: torch.distributed.checkpoint over plain safetensors files.

Promises: no pickle; equal state at an equal world size gives equal bytes; a save at world size N
loads at world size M, and each rank reads only its slices. Does not promise durability or
atomicity, which `step_store` provides.
torch's own `HuggingFaceStorageWriter` is not used: its header keys are stored in random order.
Files are named `shard-<rank>-<part>.safetensors`, with the offsets in the header.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from engines import collectives
from engines.checkpoint.background import StagingBuffers
from engines.checkpoint.tensor_files import disk_error, own_storage, write_tensors
from engines.errors import CheckpointError

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Header key from which `HuggingFaceStorageReader` reads the offsets of a file's pieces."""
_MAX_FILE_BYTES = 2 << 30


def save_sharded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's pieces into an existing directory; every rank calls it.

    Each rank writes its piece of a DTensor; one rank writes a plain tensor. Raises `OSError` on
    every rank, if the disk of one is full or fails.
    """
    _save(_SafetensorsWriter(path), path, tensors)


def stage_sharded(
    path: Path, tensors: Mapping[str, Tensor], buffers: StagingBuffers
) -> Callable[[], None]:
    """Copy this rank's pieces to the host and return a function that writes them.

    Every rank calls it; the tensors may change afterwards. The returned function may run on any
    thread: it uses no collective, raises `OSError`, and gives the buffers back.
    """
    writer = _SafetensorsWriter(path, buffers)
    _save(writer, path, tensors)
    return writer.write_staged


def _save(writer: "_SafetensorsWriter", path: Path, tensors: Mapping[str, Tensor]) -> None:
    with _own_errors("save", path):
        state_dict_saver.save(
            dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized()
        )


def load_sharded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place from files of any world size; every rank calls it.

    Also reads an ordinary Hugging Face directory. Extra tensors in the files are ignored.

    Raises:
        CheckpointError: a tensor is absent, damaged or has another shape.
        OSError: a file could not be read.
    """
    reader = _Reader(str(path))
    with _own_errors("load", path, reader):
        state_dict_loader.load(
            dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized()
        )


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


@contextmanager
def _own_errors(doing: str, path: Path, reader: _Reader | None = None) -> Iterator[None]:
    """Raise errors of torch and safetensors as `CheckpointError`, or as their `OSError` cause.

    Also silences torch's warning that without a process group it assumes a single process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:  # no subclass of `Exception`
        _, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _translated(doing, path, (reader and reader.problem) or cause) from error
    except (RuntimeError, ValueError, KeyError, OSError, SafetensorError) as error:
        raise _translated(doing, path, error) from error


def _translated(doing: str, path: Path, error: BaseException) -> Exception:
    cause = disk_error(error, path)
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        return cause
    return CheckpointError(f"cannot {doing} {path}: {' '.join(str(cause).split())[:500]}")


class _SafetensorsWriter(StorageWriter):
    """Writes or stages a rank's pieces as safetensors files with one metadata key."""

    def __init__(self, path: Path, buffers: StagingBuffers | None = None) -> None:
        super().__init__()
        self._path = path
        # Read now: the process group may be closed when staged copies are written.
        self._rank = collectives.rank()
        self._buffers = buffers
        self._staged: list[tuple[dict[str, Tensor], dict[str, list[int]]]] = []

    def write_staged(self) -> None:
        """Write the copies and give their memory back."""
        for part, (tensors, offsets) in enumerate(self._staged):
            write_shard(self._path, self._rank, part, tensors, offsets)
            for name, tensor in tensors.items():
                if self._buffers is not None:
                    self._buffers.give_back((part, name), tensor)
        self._staged = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the caller creates the directory."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write or stage this rank's pieces, split into files of limited size."""
        results: list[WriteResult] = []
        for part, items in enumerate(_parts(plan.items)):
            tensors: dict[str, Tensor] = {}
            offsets: dict[str, list[int]] = {}
            for item in items:
                value = cast(Tensor, planner.resolve_data(item)).detach()
                name = item.index.fqn
                if self._buffers is not None:
                    tensors[name] = self._buffers.copy((part, name), value)
                else:
                    tensors[name] = own_storage(value.cpu().contiguous())
                offsets[name] = list(_chunk(item).offsets)
                results.append(WriteResult(item.index, value.nbytes, None))
            if self._buffers is not None:
                self._staged.append((tensors, offsets))
            else:
                write_shard(self._path, self._rank, part, tensors, offsets)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the headers replace an index."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: the writer is only used through an instance."""
        return False


def write_shard(
    path: Path,
    rank: int,
    part: int,
    tensors: Mapping[str, Tensor],
    offsets: Mapping[str, Sequence[int]],
) -> None:
    """Write a rank's file number `part`: pieces of tensors, and where in the tensors they begin."""
    places = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    info = json.dumps(places, sort_keys=True)
    name = f"shard-{rank:05d}-{part:05d}.safetensors"
    write_tensors(tensors, path / name, {SHARDING_INFO: info})


def _chunk(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor; scalars belong into JSON")
    return item.tensor_data.chunk


def _parts(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield the non-empty pieces, sorted by name and split into files."""
    part: list[WriteItem] = []
    size = 0
    for item in sorted(items, key=lambda item: item.index.fqn):
        sizes, dtype = _chunk(item).sizes, cast(Any, item.tensor_data).properties.dtype
        num_bytes = sizes.numel() * dtype.itemsize
        if num_bytes == 0:
            continue
        if part and size + num_bytes > _MAX_FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += num_bytes
    if part:
        yield part


@dataclass(frozen=True)
class _Piece:
    file: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedReader:
    """Reads whole tensors or regions of a `save_sharded` directory without a process group."""

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
