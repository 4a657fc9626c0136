"""Sharded, reshardable state: torch.distributed.checkpoint over plain safetensors files.

Promises: no pickle is written or read; equal state at an equal world size gives equal bytes (no
ids, times or paths); a save at world size N loads at world size M, each rank reading only the
slices it holds. Does not promise durability or atomicity: that is `step_store`'s work.

torch's own `HuggingFaceStorageWriter` is not used for writing: its safetensors header carries
several metadata keys, which the format stores in random order.
Layout of a directory: `shard-<rank>-<part>.safetensors`, offsets in the header.
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
from engines.checkpoint.staging import StagingBuffers
from engines.checkpoint.tensor_files import disk_error, write_tensors
from engines.errors import CheckpointError

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Header key under which `HuggingFaceStorageReader` looks for the offsets of a file's pieces."""
_MAX_FILE_BYTES = 2 << 30


def save_sharded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's pieces of the tensors; every rank calls it.

    Args:
        path: an existing directory, shared by all ranks.
        tensors: by name; DTensors are written in pieces, plain tensors by one rank.

    Raises:
        OSError: on every rank, when the disk of any one is full or fails.
    """
    with _no_group_needed(), _own_errors("save", path):
        state_dict_saver.save(
            dict(tensors), storage_writer=_SafetensorsWriter(path), no_dist=_alone()
        )


def stage_sharded(
    path: Path, tensors: Mapping[str, Tensor], buffers: StagingBuffers
) -> Callable[[], None]:
    """Copy this rank's pieces to the host; every rank calls it.

    Args:
        path: an existing directory, shared by all ranks.
        tensors: by name; may change as soon as this returns.
        buffers: to copy into; given back once they are written.

    Returns:
        Writes the copies, for any thread: it uses no collective and raises `OSError`.
    """
    writer = _SafetensorsWriter(path, buffers)
    with _no_group_needed(), _own_errors("save", path):
        state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=_alone())
    return writer.write_staged


def load_sharded(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors in place from files of any world size; every rank calls it.

    Also reads an ordinary Hugging Face directory of safetensors files.

    Args:
        path: directory of the files.
        tensors: by name; their values are overwritten, what else the files hold is ignored.

    Raises:
        CheckpointError: a tensor is absent, damaged or has another shape.
        OSError: a file could not be read.
    """
    reader = _Reader(str(path))
    with _no_group_needed(), _own_errors("load", path, reader):
        state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=_alone())


def _alone() -> bool:
    return not dist.is_initialized()


@contextmanager
def _no_group_needed() -> Iterator[None]:
    """Without a process group torch warns that it assumes one process, which is what we mean."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Reader(HuggingFaceStorageReader):
    """Keeps a read error: torch takes it for files that hold no such thing, and says only that."""

    problem: OSError | None = None

    def read_metadata(self) -> Metadata:
        """As the parent's."""
        try:
            return super().read_metadata()
        except (SafetensorError, OSError, RuntimeError) as error:
            problem = disk_error(error, Path(self.path))
            self.problem = problem if isinstance(problem, OSError) else None
            raise


@contextmanager
def _own_errors(doing: str, path: Path, reader: _Reader | None = None) -> Iterator[None]:
    """Unwrap torch's `CheckpointException`, which no `except Exception` would catch."""
    try:
        yield
    except CheckpointException as error:
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
    """DCP storage that writes a rank's pieces as safetensors files with one metadata key.

    Args:
        path: of the files.
        buffers: copy into these instead, until `write_staged`.
    """

    def __init__(self, path: Path, buffers: StagingBuffers | None = None) -> None:
        super().__init__()
        self._path = path
        # Now: when staged copies are written, the group may have been closed.
        self._rank = collectives.rank()
        self._buffers = buffers
        self._staged: list[tuple[dict[str, Tensor], dict[str, dict[str, list[int]]]]] = []

    def write_staged(self) -> None:
        """Write the copies and give their memory back."""
        for part, (tensors, offsets) in enumerate(self._staged):
            self._write(part, tensors, offsets)
            for name, tensor in tensors.items():
                if self._buffers is not None:
                    self._buffers.give_back((part, name), tensor)
        self._staged = []

    def _write(
        self, part: int, tensors: dict[str, Tensor], offsets: dict[str, dict[str, list[int]]]
    ) -> None:
        info = json.dumps(offsets, sort_keys=True)
        name = f"shard-{self._rank:05d}-{part:05d}.safetensors"
        write_tensors(tensors, self._path / name, {SHARDING_INFO: info})

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is the caller's to make."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces, as many files as the size asks for."""
        results: list[WriteResult] = []
        for part, items in enumerate(_parts(plan.items)):
            tensors: dict[str, Tensor] = {}
            offsets: dict[str, dict[str, list[int]]] = {}
            for item in items:
                value = cast(Tensor, planner.resolve_data(item)).detach()
                name = item.index.fqn
                tensors[name] = self._on_host((part, name), value)
                offsets[name] = {"saved_offsets": list(_chunk(item).offsets)}
                size = value.numel() * value.element_size()
                results.append(WriteResult(item.index, size, None))
            if self._buffers is not None:
                self._staged.append((tensors, offsets))
            else:
                self._write(part, tensors, offsets)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _on_host(self, key: tuple[int, str], value: Tensor) -> Tensor:
        if self._buffers is not None:
            return self._buffers.copy(key, value)
        piece = value.cpu().contiguous()
        # A view would drag its whole storage into the file.
        return piece.clone() if _is_view(piece) else piece

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """No index is written: the headers say everything."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Only used through an instance."""
        return False


def _chunk(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor; scalars belong into JSON")
    return item.tensor_data.chunk


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _parts(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Non-empty pieces by name, cut into files."""
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
    """Whole tensors of a sharded directory, one at a time, without a process group.

    Args:
        path: a directory written by `save_sharded`.

    Raises:
        CheckpointError: it holds no shard, or a shard has no offsets.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: dict[str, list[_Piece]] = {}
        files = sorted(path.glob("shard-*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no shard")
        for file in files:
            self._index(file)

    def _index(self, file: Path) -> None:
        with safe_open(file, framework="pt") as shard:
            info = (shard.metadata() or {}).get(SHARDING_INFO)
            if info is None:
                raise CheckpointError(f"{file} does not say which pieces it holds")
            offsets = json.loads(info)
            for name in shard.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                piece = _Piece(
                    file,
                    tuple(offsets[name]["saved_offsets"]),
                    tuple(shard.get_slice(name).get_shape()),
                )
                self._pieces.setdefault(name, []).append(piece)

    def names(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ends = [
            [o + n for o, n in zip(piece.offsets, piece.shape, strict=True)]
            for piece in self._pieces[name]
        ]
        return tuple(max(column) for column in zip(*ends, strict=True))

    def read(self, name: str) -> Tensor:
        """Put a tensor's pieces together.

        Args:
            name: one of `names()`.

        Returns:
            The whole tensor, on the CPU.

        Raises:
            CheckpointError: pieces are missing.
        """
        shape = self.shape(name)
        return self.read_region(name, (0,) * len(shape), shape)

    def read_region(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Put a rectangular part of a tensor together, reading no more than it.

        Args:
            name: one of `names()`.
            offsets: of the part in the tensor.
            shape: of the part.

        Returns:
            The part, on the CPU.

        Raises:
            CheckpointError: pieces are missing.
        """
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
