"""Tensors in one flat piece of memory: where each lies, and filling one piece after the other.

Promises: every tensor begins at a multiple of `ALIGNMENT_BYTES`; one that is larger than a bucket
has a bucket of its own, as large as it is; whoever reads the description gets views, no copies.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
BUCKET_BYTES = 16 * 2**20
"""Larger ones cost more to touch for the first time than they save."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its bucket.

    Attributes:
        name: of the tensor.
        dtype: name of torch's dtype.
        shape: of the tensor.
        offset_bytes: of its first byte.
        checksum: of the tensor where it came from; empty where all are compared at the end.
    """

    name: str
    dtype: str
    shape: list[int]
    offset_bytes: int
    checksum: str = ""

    @property
    def end_bytes(self) -> int:
        """Behind its last byte."""
        return self.offset_bytes + math.prod(self.shape) * self._dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in memory of its bucket: (N,) uint8."""
        part = memory[self.offset_bytes : self.end_bytes]
        return part.view(self._dtype).view(self.shape)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def entries_to_json(entries: Sequence[Entry]) -> str:
    """What `entries_from_json` reads."""
    return json.dumps([astuple(entry) for entry in entries])


def entries_from_json(text: str) -> list[Entry]:
    """Undo `entries_to_json`."""
    return [Entry(*entry) for entry in json.loads(text)]


class Packer:
    """Fills one bucket after the other.

    Args:
        bucket_bytes: of a bucket.
        open_bucket: memory of at least so many bytes for the next bucket, (N,) uint8.
        publish: passes on what was put there.
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
        """Copy a tensor behind the others, or into the next bucket."""
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
        """Publish what lies in the bucket, if anything does."""
        if self._entries:
            entries, self._entries, self._offset_bytes = self._entries, [], 0
            self._publish(entries)
