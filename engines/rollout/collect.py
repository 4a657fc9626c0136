"""A synchronous front of a rollout engine, for callers without an event loop.

Promises: every sample of every request, or an error by the deadline; the order is that of the
requests and their seeds, whatever finished first.
"""

import asyncio
from collections.abc import Sequence

from engines.errors import RolloutError
from engines.rollout.base import RolloutEngine
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


def generate_all(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float = 1800.0
) -> list[Completion]:
    """Sample every request and wait for all of it. Not for code inside an event loop.

    Args:
        engine: the engine.
        requests: what to sample; the ids must differ.
        timeout_s: deadline of the whole batch, beside the engine's own.

    Returns:
        One completion per sample, in the order of (request, sample index).

    Raises:
        RolloutError: the engine refused a request, or lost a sample.
        DeadlineError: samples are unfinished at the deadline.
    """
    completions = asyncio.run(_collect(engine, requests, timeout_s))
    place = {request.request_id: index for index, request in enumerate(requests)}
    completions.sort(key=lambda c: (place[c.request_id], c.sample_index))
    wanted = [(r.request_id, index) for r in requests for index in range(r.num_samples)]
    if [(c.request_id, c.sample_index) for c in completions] != wanted:
        raise RolloutError(f"asked for {len(wanted)} samples, got {len(completions)}, not the same")
    return completions


async def _collect(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float
) -> list[Completion]:
    completions: list[Completion] = []
    try:
        async with asyncio.timeout(timeout_s):
            async for completion in engine.generate(requests):
                completions.append(completion)
    except TimeoutError:
        num_missing = sum(r.num_samples for r in requests) - len(completions)
        raise DeadlineError(f"{num_missing} samples", timeout_s) from None
    return completions
