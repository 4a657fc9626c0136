"""Weights and caches of rollout engines against sums worked by hand."""

import pytest
from cost_inputs import A3B, B8, B32, sampled_of, shape_of

from engines.cost.engine_bytes import engine_bytes

GB = 10**9
MEMORY = 80 * GB


@pytest.mark.parametrize(("model", "gigabytes"), [("", 0.97), (B8, 1.25), (B32, 2.23), (A3B, 0.84)])
def test_cache_of_a_sample_of_8500_tokens(model: str, gigabytes: float) -> None:
    sampled = sampled_of(shape_of(model), prompt=500, answer=8000)
    assert engine_bytes(sampled, 8, MEMORY, MEMORY).sequence / GB == pytest.approx(
        gigabytes, abs=0.006
    )


def test_an_embedded_engine_caches_what_fits() -> None:
    shape = shape_of(B8)
    sampled = sampled_of(shape, prompt=500, answer=8000, count=1024, max_num_sequences=256)
    found = engine_bytes(sampled, 8, MEMORY, 40 * GB)
    assert found.weights == 2 * shape.num_parameters
    assert found.num_engines == 8
    # 128 samples for each engine, of which the memory holds 18.
    assert found.num_running == (40 * GB - found.weights) // found.sequence == 18
    assert found.cache == 18 * found.sequence
    assert engine_bytes(sampled, 8, 10**12, 10**12).num_running == 128
    tight = engine_bytes(sampled, 8, MEMORY, found.weights)
    assert (tight.num_running, tight.cache) == (1, found.sequence)


def test_vllm_takes_its_fraction() -> None:
    shape = shape_of(B8)
    sampled = sampled_of(shape, engine="vllm", options={"gpu_memory_utilization": 0.5})
    found = engine_bytes(sampled, 8, MEMORY, 0)
    assert found.weights + found.cache == 40 * GB
    fixed = sampled_of(shape, engine="vllm", options={"kv_cache_bytes": 5 * GB})
    assert engine_bytes(fixed, 8, MEMORY, 0).cache == 5 * GB
    assert engine_bytes(sampled_of(shape, engine="sglang"), 8, MEMORY, 0).cache == (
        68 * GB - found.weights
    )


def test_tensor_parallel_workers_share_weights_and_heads() -> None:
    shape = shape_of(A3B)  # four key-value heads
    whole = engine_bytes(sampled_of(shape, engine="vllm"), 0, MEMORY, 0)
    options = {"tensor_parallel_size": 8}
    settings = {"engine": "vllm", "placement": "disaggregated", "num_replicas": 3}
    shared = engine_bytes(sampled_of(shape, **settings, options=options), 0, MEMORY, 0)
    assert shared.weights == -(-whole.weights // 8)
    assert shared.sequence == whole.sequence // 4
    assert (shared.num_engines, shared.num_devices) == (3, 8)
