"""Tensors packed into buckets: flat uint8 memory with a description of where each tensor lies.

Every tensor begins at a multiple of `ALIGNMENT_BYTES`; one that is larger than a bucket gets a
bucket of its own size. Readers get views, no copies.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
BUCKET_BYTES = 16 * 2**20
"""Larger buckets cost more page faults at the first touch than they save."""


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
        """Offset behind the last byte."""
        return self.offset_bytes + math.prod(self.shape) * self._dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of its bucket's memory, (N,) uint8."""
        part = memory[self.offset_bytes : self.end_bytes]
        return part.view(self._dtype).view(self.shape)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def entries_to_json(entries: Sequence[Entry]) -> str:
    """Return entries as text for `entries_from_json`."""
    return json.dumps([astuple(entry) for entry in entries])


def entries_from_json(text: str) -> list[Entry]:
    """Read the text of `entries_to_json`."""
    return [Entry(*entry) for entry in json.loads(text)]


class Packer:
    """Copies tensors into one bucket after the other.

    `open_bucket` returns (N,) uint8 memory of at least that many bytes; `publish` passes it on.
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

    def add(self, name: str, tensor: Tensor, checksum: str = "") -> None:
        """Copy a tensor into the current bucket, or into the next one if it does not fit."""
        if self._offset_bytes + tensor.nbytes > self._bucket_bytes:
            self.flush()
        if not self._entries:
            self._memory = self._open_bucket(max(self._bucket_bytes, tensor.nbytes))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = Entry(name, dtype, list(tensor.shape), self._offset_bytes, checksum)
        entry.view(self._memory).copy_(tensor)
        self._entries.append(entry)
        self._offset_bytes += math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def flush(self) -> None:
        """Publish the current bucket, if it holds anything."""
        if self._entries:
            entries, self._entries, self._offset_bytes = self._entries, [], 0
            self._publish(entries)
