"""Seconds against what was measured on one H200 (Qwen3-0.6B's shape, bfloat16)."""

from dataclasses import replace

import pytest
from cost_inputs import B8, H100X8, H200, sampled_of, shape_of, training_of, work_of

from engines.cost.engine_bytes import engine_bytes
from engines.cost.seconds import SYNC_S, sample_seconds, sync_seconds, train_seconds

NUM_TOKENS = 2**20
WITHIN = 0.3


def rate(**settings: object) -> float:
    work = work_of(shape_of(), training_of(**settings), num_tokens=NUM_TOKENS)
    return NUM_TOKENS / train_seconds(work, H200)


def test_tokens_per_second_of_training() -> None:
    assert rate(gradient_checkpointing=True) == pytest.approx(35_900, rel=WITHIN)
    assert rate(use_torch_compile=True) == pytest.approx(59_600, rel=WITHIN)


def test_tokens_per_second_of_logprobs() -> None:
    work = work_of(shape_of(), training_of(), num_tokens=NUM_TOKENS)
    frozen = replace(work.roles[0], num_trained=0, num_passes=1)
    seconds = train_seconds(replace(work, roles=(frozen,)), H200)
    assert NUM_TOKENS / seconds == pytest.approx(149_000, rel=WITHIN)


@pytest.mark.parametrize(("engine", "measured"), [("vllm", 23_000), ("transformers", 12_400)])
def test_tokens_per_second_of_sampling(engine: str, measured: float) -> None:
    sampled = sampled_of(shape_of(), engine=engine)
    found = engine_bytes(sampled, 1, H200.memory_bytes, H200.memory_bytes)
    seconds = sample_seconds(sampled, found, H200)
    assert seconds is not None
    assert 256 * 512 / seconds == pytest.approx(measured, rel=WITHIN)


def test_unknown_numbers_of_samples_have_no_seconds() -> None:
    sampled = sampled_of(shape_of(), count=None)
    found = engine_bytes(sampled, 0, H200.memory_bytes, H200.memory_bytes)
    assert sample_seconds(sampled, found, H200) is None


def test_a_small_cache_costs_rounds() -> None:
    sampled = sampled_of(shape_of(B8), answer=4096)
    found = engine_bytes(sampled, 1, H200.memory_bytes, H200.memory_bytes)
    all_at_once = sample_seconds(sampled, replace(found, num_running=256), H200)
    in_rounds = sample_seconds(sampled, replace(found, num_running=16), H200)
    assert all_at_once is not None
    assert in_rounds is not None
    assert in_rounds > 2 * all_at_once


def test_a_sync_is_limited_by_the_link() -> None:
    shape = shape_of(B8)
    sampled = sampled_of(shape, sync=shape.num_parameters)
    found = engine_bytes(sampled, 8, H100X8.memory_bytes, H100X8.memory_bytes)
    one_node = sync_seconds(sampled, found, H100X8) - SYNC_S
    two_nodes = sync_seconds(sampled, found, H100X8.with_devices(16)) - SYNC_S
    assert one_node == pytest.approx(16.4 / (0.8 * 450) + 4 * 16.4 / (0.8 * 3350), rel=0.01)
    assert two_nodes - one_node == pytest.approx(16.4 / 0.8 * (1 / 50 - 1 / 450), rel=0.01)


def test_more_ranks_and_compilation_are_faster() -> None:
    work = work_of(shape_of(B8), training_of(num_workers=8))
    once = train_seconds(work, H100X8)
    twice = replace(work, training=training_of(num_workers=4))
    assert train_seconds(twice, H100X8) > 1.8 * once
    moved = replace(work, training=training_of(num_workers=8, optimizer_offload=True))
    state = 8 * work.roles[0].shape.num_parameters / 8
    assert train_seconds(moved, H100X8) - once == pytest.approx(2 * state / (0.8 * 64e9), rel=1e-3)


def test_short_micro_batches_wait_for_the_network() -> None:
    small = training_of(num_workers=64, max_tokens_per_micro_batch=1024)
    work = work_of(shape_of(B8), small)
    one_node = H100X8.with_devices(64).model_copy(update={"devices_per_node": 64})
    assert train_seconds(work, H100X8.with_devices(64)) > 1.5 * train_seconds(work, one_node)
