"""Weight sync between a training engine and a rollout engine of one process.

Promises: what `engines.weight_sync.base` promises. The sender's digest is computed from the
tensors it streams, the receiver's from its own parameters after the last one arrived, so a
tensor that was lost, stale, cast twice or written to the wrong place is found.
Does not move memory between devices beyond the copy into the receiver's parameters.
"""

import asyncio
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.weight_sync.base import CheckpointEngine, SyncReport


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
        self.num_bytes = 0

    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if name in self._checksums:
            raise WeightSyncError(f"{name}: the training engine sent it twice")
        self._checksums[name] = tensor_checksum(tensor)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return name, tensor

    @property
    def num_tensors(self) -> int:
        """Tensors that passed so far."""
        return len(self._checksums)

    @property
    def digest(self) -> str:
        """Digest of what passed so far."""
        return combine(self._checksums.items())


class InProcessCheckpointEngine(CheckpointEngine):
    """Streams into a rollout engine of the same process.

    Args:
        rollout_engine: the receiver.
        dtype: name of its dtype (`float32`, `bfloat16`).
    """

    def __init__(self, rollout_engine: RolloutEngine, dtype: str) -> None:
        self._rollout_engine = rollout_engine
        self._dtype: torch.dtype = getattr(torch, dtype)

    def send_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> SyncReport:
        """See the base class. Not for code that already runs inside an event loop."""
        return asyncio.run(self.send_weights_async(tensors, version))

    async def send_weights_async(
        self, tensors: Iterator[tuple[str, Tensor]], version: int
    ) -> SyncReport:
        """`send_weights` for callers inside the rollout engine's event loop."""
        start = time.monotonic()
        stream = OutgoingStream(iter(tensors), self._dtype)
        received = await self._rollout_engine.update_weights(stream, version)
        if received != stream.digest:
            raise WeightSyncError(
                f"version {version}: sent digest {stream.digest} of {stream.num_tensors} tensors, "
                f"the rollout engine holds {received}; it will not generate from them"
            )
        await self._rollout_engine.finish_update(version, stream.digest)
        return SyncReport(
            version=version,
            digest=received,
            num_tensors=stream.num_tensors,
            num_bytes=stream.num_bytes,
            seconds=time.monotonic() - start,
        )
