"""What a sender does to weights on their way: the receiver's dtype, and a checksum of each.

Promises: a tensor passes as it is where its dtype is the receiver's; the checksum is that of what
passes, computed before anyone else sees it; one that was cast has memory of its own, so that a
receiver may still read it while the next one is made.
Does not promise that a receiver sees it unchanged: that is what the checksum is for.
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
    """Casts the tensors of an iterator and keeps the checksum of each that passes.

    Args:
        tensors: (name, full tensor) pairs.
        dtype: dtype of the receiver; floating-point tensors are cast to it.
        float32_names: but these are float32 there, see `hub_names.served_float32_names`.
    """

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
        """What passed so far."""
        digest = combine(self._checksums.items())
        return Receipt(digest, len(self._checksums), self._num_bytes)


def received_dtype(
    name: str, sent: torch.dtype, served: torch.dtype, float32_names: Collection[str]
) -> torch.dtype:
    """The dtype in which a receiver holds a weight.

    Args:
        name: of the weight.
        sent: its dtype at the sender.
        served: of the receiver.
        float32_names: weights that are float32 there all the same.

    Returns:
        `sent` for what is no floating-point number.
    """
    if not sent.is_floating_point:
        return sent
    return torch.float32 if name in float32_names else served


@contextmanager
def in_step(tensors: Iterable[object]) -> Iterator[None]:
    """Sending by one rank of several, which goes on as they do when its receivers are lost.

    Each tensor is put together by all ranks: one that stopped in the middle would leave the others
    waiting, and a lost receiver is no reason to lose them too.

    Args:
        tensors: what is sent; taken to its end before the error goes on.

    Raises:
        ReceiverGoneError: as the block raised it.
        DeadlineError: likewise.
    """
    try:
        yield
    except (ReceiverGoneError, DeadlineError):
        if world_size() > 1:
            for _ in tensors:
                pass
        raise
