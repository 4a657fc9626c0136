"""Sampling within a limited cache, and after the device ran out of memory."""

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError
from engines.rollout.transformers.engine import FREE_SHARE, TransformersEngine
from engines.rollout.transformers.kv_cache import LENGTH_STEP, KVCache
from engines.types import RolloutRequest, SamplingParams
from hardware.cpu import CPUPlatform

POSITION_BYTES = 2 * 2 * 2 * 8 * 4
"""Layers x keys and values x heads x width x float32 of the laboratory's model."""


def sampled(engine: TransformersEngine, requests: list[RolloutRequest]) -> dict[Any, Any]:
    async def collect() -> dict[Any, Any]:
        async with asyncio.timeout(60):
            stream = engine.generate(requests)
            return {(c.request_id, c.sample_index): c.token_ids.tolist() async for c in stream}

    return asyncio.run(collect())


def watch_batch(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Note (rows, bytes of the cache) after each decoding step."""
    seen, decode = [], engine._batch.decode

    def noted() -> list[Any]:
        num_rows, finished = len(engine._batch.samples), decode()
        seen.append((num_rows, engine._batch._cache.size_bytes))
        return finished

    monkeypatch.setattr(engine._batch, "decode", noted)
    return seen


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=12))
def test_what_fits_never_exceeds_the_limit(asked: list[tuple[int, int]]) -> None:
    cache = KVCache(9, 1000, max_positions=9 * LENGTH_STEP + 5)
    for num_rows, length in asked:
        if cache.fits(num_rows, length):
            cache.reserve(num_rows, length)
            assert cache.num_positions <= cache.max_positions
            assert cache.length >= length


def test_fewer_rows_that_grow_keep_what_is_stored() -> None:
    cache = KVCache(8, 1000, max_positions=4 * LENGTH_STEP)
    cache.reserve(4, 5)
    stored = torch.randn(4, 2, 5, 3)
    cache.write_prefixes(0, 0, stored, stored + 1)
    cache.reserve(2, LENGTH_STEP + 1)
    keys, values = cache.read_row(1, 5)[0]
    assert torch.equal(keys[0], stored[1])
    assert torch.equal(values[0], stored[1] + 1)
    assert cache.num_positions == 4 * LENGTH_STEP


def test_a_limited_cache_draws_the_same_tokens(long_lab, monkeypatch) -> None:
    requests = long_lab.requests(6, 3, max_new_tokens=40, seed=5)
    expected = sampled(long_lab.engine(), requests)
    limit = 6 * LENGTH_STEP * POSITION_BYTES
    engine = long_lab.engine(options={"kv_cache_bytes": limit})
    seen, returned = watch_batch(engine, monkeypatch), []
    send_back = engine._scheduler.send_back

    def noted(samples) -> None:
        returned.extend(samples)
        send_back(samples)

    monkeypatch.setattr(engine._scheduler, "send_back", noted)
    assert sampled(engine, requests) == expected
    assert max(size_bytes for _, size_bytes in seen) == limit
    assert max(num_rows for num_rows, _ in seen) == 6
    assert len(returned) >= 3, "rows of 64 positions: only three of the six"
    assert engine._batch._cache.size_bytes == 0


@pytest.mark.parametrize("step", ["decode", "_prefill"])
def test_a_full_device_halves_the_cache(long_lab, monkeypatch, step: str) -> None:
    """Prefills of at most 20 tokens: the second one fails when others have already joined."""
    settings = {"options": {"max_prefill_tokens": 20}}
    requests = long_lab.requests(6, 2, max_new_tokens=20, seed=6)
    requests.append(RolloutRequest("one token", (5,), SamplingParams(1), (3,)))
    expected = sampled(long_lab.engine(**settings), requests)
    engine = long_lab.engine(**settings)
    work, calls = getattr(engine._batch, step), []

    def fails_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(*arguments)

    monkeypatch.setattr(engine._batch, step, fails_once)
    assert sampled(engine, requests) == expected
    assert len(calls) > 3
    assert engine._batch._cache.max_positions < 13 * 2 * LENGTH_STEP


def test_one_sample_that_fills_the_device_is_an_error(long_lab, monkeypatch) -> None:
    engine = long_lab.engine()

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._batch, "decode", fails)
    with pytest.raises(RolloutError, match="sampling failed: CUDA out of memory"):
        sampled(engine, long_lab.requests(1, 1, max_new_tokens=20))


def test_a_sample_above_the_limit_is_refused(long_lab) -> None:
    engine = long_lab.engine(options={"kv_cache_bytes": LENGTH_STEP * POSITION_BYTES})
    request = RolloutRequest("long", (5, 6), SamplingParams(LENGTH_STEP), (1,))
    need = 2 * LENGTH_STEP * POSITION_BYTES
    with pytest.raises(RolloutError, match=rf"kv_cache_bytes: got \d+; need {need} for a sample"):
        sampled(engine, [request])
    fitting = RolloutRequest("short", (5, 6), SamplingParams(LENGTH_STEP - 2), (1,))
    assert len(sampled(engine, [fitting])) == 1


def test_an_accelerator_limits_the_cache_by_its_free_memory(long_lab, monkeypatch) -> None:
    class Device(CPUPlatform):
        def free_memory_bytes(self) -> int:
            return int(4 * LENGTH_STEP * POSITION_BYTES / FREE_SHARE) + 8

    engine = TransformersEngine(long_lab.directory, RolloutConfig(), "float32", Device())
    long_lab.send(engine, long_lab.model, 0)
    seen = watch_batch(engine, monkeypatch)
    requests = long_lab.requests(4, 2, max_new_tokens=8, seed=7)
    assert sampled(engine, requests) == sampled(long_lab.engine(), requests)
    assert max(num_rows for num_rows, _ in seen) == 4
