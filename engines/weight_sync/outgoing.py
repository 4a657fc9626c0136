"""Casts weights to the receiver's dtype and computes a checksum of each before it is sent.

A cast tensor has its own memory, so it can be read while the next one is made.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.collectives import world_size
from engines.errors import WeightSyncError
from engines.weight_sync.base import Receipt, ReceiverGoneError
from infra.errors import DeadlineError


class OutgoingStream(Iterator[tuple[str, Tensor]]):
    """Casts (name, full tensor) pairs by `received_dtype` and keeps the checksum of each."""

    def __init__(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        dtype: torch.dtype,
        float32_names: Collection[str] = (),
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._float32_names = frozenset(float32_names)
        self._checksums: dict[str, str] = {}
        self._num_bytes = 0

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        tensor = tensor.detach()
        if name in self._checksums:
            raise WeightSyncError(f"{name}: the training engine sent it twice")
        tensor = tensor.to(received_dtype(name, tensor.dtype, self._dtype, self._float32_names))
        self._checksums[name] = tensor_checksum(tensor)
        self._num_bytes += tensor.nbytes
        return name, tensor

    @property
    def sent(self) -> Receipt:
        """Receipt of what passed so far."""
        digest = combine(self._checksums.items())
        return Receipt(digest, len(self._checksums), self._num_bytes)


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
    """Consume the rest of `tensors` before a lost receiver's error is raised.

    All ranks gather each tensor together: one that stopped midway would leave the others waiting.
    """
    try:
        yield
    except (ReceiverGoneError, DeadlineError):
        if world_size() > 1:
            for _ in tensors:
                pass
        raise
