"""Cast, checksum and pack tensors into buckets before they are sent, for every transport.

A bucket is flat uint8 memory with a description of where each tensor lies. Every tensor begins at a
multiple of `ALIGNMENT_BYTES`; a tensor larger than a bucket gets a bucket of its own size.
Promises: a tensor is cast and packed in one pass over its memory, and its checksum is of what lies
in the bucket; readers of a bucket get views, no copies.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from engines.checksum import ChecksumMethod, TensorChecksums
from engines.collectives import world_size
from engines.errors import WeightSyncError
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from infra.errors import DeadlineError

ALIGNMENT_BYTES = 64
BUCKET_BYTES = 16 * 2**20
"""Larger buckets cost more page faults at the first touch than they save."""


class CastStream(Iterator[tuple[str, Tensor]]):
    """Casts (name, full tensor) pairs by `received_dtype` and keeps the checksum of each.

    A tensor that was cast is valid until the next but one is requested.
    """

    def __init__(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype,
        float32_names: Collection[str] = (),
        method: ChecksumMethod = "xxh3",
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._float32_names = frozenset(float32_names)
        self._checksums = TensorChecksums(method)
        self._staging = deque([torch.empty(0, dtype=torch.uint8)] * 2)

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        tensor, dtype = tensor.detach(), self._dtype_of(name, tensor)
        if tensor.dtype != dtype:
            tensor = self._cast(tensor, dtype)
        self._checksums.add(name, tensor)
        return name, tensor

    def pack(self, packer: "Packer") -> None:
        """Pack the tensors that are left; they are cast into their bucket."""
        for name, tensor in self._tensors:
            dtype = self._dtype_of(name, tensor)
            self._checksums.add(name, packer.add(name, tensor.detach(), dtype=dtype))
        packer.flush()

    @property
    def sent(self) -> WeightDigest:
        """Digest of the tensors that were read so far."""
        return WeightDigest.of(self._checksums)

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype to cast a tensor to; WeightSyncError if its name came before."""
        if name in self._checksums:
            raise WeightSyncError(f"{name}: the training engine sent it twice")
        return received_dtype(name, tensor.dtype, self._dtype, self._float32_names)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast into the memory of the cast before the last: fresh memory is slow to touch first."""
        flat, num_bytes = self._staging.popleft(), tensor.numel() * dtype.itemsize
        if flat.numel() < num_bytes or flat.device != tensor.device:
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
        self._staging.append(flat)
        return flat[:num_bytes].view(dtype).view(tensor.shape).copy_(tensor)


def settle(memory: Tensor) -> None:
    """Wait until all work queued on this memory's device is done."""
    if memory.device.type != "cpu":
        torch.accelerator.synchronize(memory.device)


def received_dtype(
    name: str, sent: torch.dtype, served: torch.dtype, float32_names: Collection[str]
) -> torch.dtype:
    """Return the dtype in which a receiver that serves dtype `served` holds a weight.

    Weights in `float32_names` are float32; weights that are not floating-point keep theirs.
    """
    if not sent.is_floating_point:
        return sent
    return torch.float32 if name in float32_names else served


@contextmanager
def in_step(tensors: Iterable[object]) -> Iterator[None]:
    """Consume the rest of `tensors` after the block, also if a receiver is lost.

    All ranks gather each tensor together: one that stopped midway would leave the others waiting.
    """
    try:
        yield
    except (ReceiverGoneError, DeadlineError):
        if world_size() > 1:
            deque(tensors, maxlen=0)
        raise
    deque(tensors, maxlen=0)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its bucket; `checksum` is empty where only digests are compared."""

    name: str
    dtype: str
    shape: list[int]
    offset_bytes: int
    checksum: str = ""

    @property
    def end_bytes(self) -> int:
        """Offset after the last byte."""
        return self.offset_bytes + math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of its bucket's memory, (N,) uint8."""
        flat = memory[self.offset_bytes : self.end_bytes].view(getattr(torch, self.dtype))
        return flat.view(self.shape)


def entries_to_json(entries: Sequence[Entry]) -> str:
    """Return entries as text for `entries_from_json`."""
    return json.dumps([astuple(entry) for entry in entries])


def entries_from_json(text: str) -> list[Entry]:
    """Read the text of `entries_to_json`."""
    return [Entry(*entry) for entry in json.loads(text)]


class Packer:
    """Copies tensors into one bucket after the other.

    `open_bucket(num_bytes)` returns (N,) uint8 memory, N >= num_bytes; `publish` sends it.
    """

    def __init__(
        self,
        bucket_bytes: int,
        open_bucket: Callable[[int], Tensor],
        publish: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self._open_bucket, self._publish = open_bucket, publish
        self._entries: list[Entry] = []
        self._offset_bytes = 0
        self._memory = torch.empty(0)

    def add(
        self, name: str, tensor: Tensor, checksum: str = "", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Copy a tensor into the current bucket, or into the next one if it does not fit.

        Returns the view of the bucket, in `dtype` or else in the tensor's.
        """
        dtype = dtype or tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        if self._offset_bytes + num_bytes > self._bucket_bytes:
            self.flush()
        if not self._entries:
            self._memory = self._open_bucket(max(self._bucket_bytes, num_bytes))
        named = str(dtype).removeprefix("torch.")
        entry = Entry(name, named, list(tensor.shape), self._offset_bytes, checksum)
        self._entries.append(entry)
        self._offset_bytes += math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return entry.view(self._memory).copy_(tensor)

    def flush(self) -> None:
        """Publish the current bucket, if it holds anything."""
        if self._entries:
            entries, self._entries, self._offset_bytes = self._entries, [], 0
            self._publish(entries)
