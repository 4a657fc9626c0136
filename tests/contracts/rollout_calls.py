"""Blocking calls of a rollout engine that lives in the caller's process, for tests."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from torch import Tensor

from engines.errors import WeightSyncError
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import collect
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.in_process import InProcessTransport

SYNC_TIMEOUT_S = 60.0


def generate_all(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float = 1800.0
) -> list[Completion]:
    """One completion per sample, in the order of (request, sample index)."""
    rows = asyncio.run(collect(engine, requests, timeout_s))
    return [completion for row in rows for completion in row]


def send_weights(
    engine: RolloutEngine,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    dtype: str = "float32",
    float32_names: Collection[str] = (),
) -> WeightDigest:
    """Send weights by name, to be served as `version`; returns what was sent."""
    return asyncio.run(send_weights_async(engine, tensors, version, dtype, float32_names))


async def send_weights_async(
    engine: RolloutEngine,
    tensors: Iterable[tuple[str, Tensor]],
    version: int,
    dtype: str = "float32",
    float32_names: Collection[str] = (),
) -> WeightDigest:
    """`send_weights` inside the loop that the engine belongs to."""
    transport = InProcessTransport(dtype, SYNC_TIMEOUT_S, float32_names)
    sending = asyncio.get_running_loop().run_in_executor(None, transport.send, iter(tensors))
    try:
        held = await engine.update_weights(transport, version)
    except BaseException:
        transport.stop()
        with suppress(ReceiverGoneError):
            await sending  # its error is the cause
        raise
    sent = await sending
    if held != sent:
        raise WeightSyncError(f"sent digest {sent}, the engine holds {held}")
    await engine.finish_update(version, sent.digest)
    return sent
