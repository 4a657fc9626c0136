"""The sender's side of a sync: what leaves the trainer, cast and counted."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync.base import Receipt


class OutgoingStream(Iterator[tuple[str, Tensor]]):
    """Casts the tensors of an iterator and keeps the checksum of each that passes.

    Args:
        tensors: (name, full tensor) pairs.
        dtype: dtype of the receiver; floating-point tensors are cast to it.
    """

    def __init__(self, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._checksums: dict[str, str] = {}
        self._num_bytes = 0

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if name in self._checksums:
            raise WeightSyncError(f"{name}: the training engine sent it twice")
        self._checksums[name] = tensor_checksum(tensor)
        self._num_bytes += tensor.numel() * tensor.element_size()
        return name, tensor

    @property
    def sent(self) -> Receipt:
        """What passed so far."""
        digest = combine(self._checksums.items())
        return Receipt(digest, len(self._checksums), self._num_bytes)
