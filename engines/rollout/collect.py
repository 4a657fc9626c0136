"""All samples of a batch of requests.

Promises: every sample of every request, or an error by the deadline; the order is that of the
requests and their seeds, whatever finished first.
"""

import asyncio
from collections.abc import Sequence

from engines.errors import RolloutError
from engines.rollout.base import RolloutEngine
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


async def collect(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float
) -> list[list[Completion]]:
    """Sample every request and wait for all of it.

    Args:
        engine: the engine.
        requests: what to sample; the ids must differ.
        timeout_s: deadline of the whole batch, beside the engine's own.

    Returns:
        For each request its completions, in the order of its seeds.

    Raises:
        RolloutError: the engine refused a request, or lost or doubled a sample.
        DeadlineError: samples are unfinished at the deadline.
    """
    found: list[Completion] = []
    wanted = [(r.request_id, index) for r in requests for index in range(r.num_samples)]
    try:
        async with asyncio.timeout(timeout_s):
            async for completion in engine.generate(requests):
                found.append(completion)
    except TimeoutError:
        raise DeadlineError(f"{len(wanted) - len(found)} samples", timeout_s) from None
    place = {request.request_id: index for index, request in enumerate(requests)}
    found.sort(key=lambda c: (place[c.request_id], c.sample_index))
    if [(c.request_id, c.sample_index) for c in found] != wanted:
        raise RolloutError(f"asked for {len(wanted)} samples, got {len(found)}, not the same")
    ordered = iter(found)
    return [[next(ordered) for _ in request.seeds] for request in requests]
