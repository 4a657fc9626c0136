"""Weight sync between a training engine and a rollout engine of one process.

Promises: what `engines.weight_sync.base` promises. The sender's digest is computed from the
tensors it streams, the receiver's from its own parameters after the last one arrived, so a
tensor that was lost, stale, cast twice or written to the wrong place is found.
Does not move memory between devices beyond the copy into the receiver's parameters.
"""

import asyncio
import time
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from engines.errors import WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.weight_sync.base import CheckpointEngine, SyncReport
from engines.weight_sync.outgoing import OutgoingStream


class InProcessCheckpointEngine(CheckpointEngine):
    """Streams into a rollout engine of the same process.

    Args:
        rollout_engine: the receiver.
        dtype: name of its dtype (`float32`, `bfloat16`).
        float32_names: of `OutgoingStream`.
    """

    def __init__(
        self, rollout_engine: RolloutEngine, dtype: str, float32_names: Collection[str] = ()
    ) -> None:
        self._rollout_engine = rollout_engine
        self._float32_names = float32_names
        self._dtype: torch.dtype = getattr(torch, dtype)

    def send_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> SyncReport:
        """See the base class. Not for code that already runs inside an event loop."""
        return asyncio.run(self.send_weights_async(tensors, version))

    async def send_weights_async(
        self, tensors: Iterator[tuple[str, Tensor]], version: int
    ) -> SyncReport:
        """`send_weights` for callers inside the rollout engine's event loop."""
        start = time.monotonic()
        stream = OutgoingStream(iter(tensors), self._dtype, self._float32_names)
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
