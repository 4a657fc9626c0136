"""Recorded decode steps: on a CPU that replays as a device does, through real generation."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlhf.testing.recorded_work import RecordingCPU, StaleRecordingError
from rlhf.testing.rollout_calls import generate_all, send_weights_async

from engines.config.rollout import RolloutConfig
from engines.rollout.transformers.decode_graphs import MAX_NUM_GRAPHS, DecodeGraphs
from engines.rollout.transformers.engine import TransformersEngine
from engines.rollout.transformers.kv_cache import LENGTH_STEP, KVCache
from engines.types import Completion, RolloutRequest, SamplingParams

CPU = torch.device("cpu")
POSITION_BYTES = 2 * 2 * 2 * 8 * 4
"""Layers x keys and values x heads x width x float32 of the laboratory's model."""
Samples = dict[tuple[str, int], Completion]


def recording_engine(lab, **settings) -> tuple[TransformersEngine, RecordingCPU]:
    platform = RecordingCPU()
    engine = TransformersEngine(lab.directory, RolloutConfig(**settings), "float32", platform)
    lab.send(engine, lab.model, 0)
    return engine, platform


def run(coroutine):
    async def with_deadline():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(with_deadline())


async def collect(engine, requests) -> Samples:
    return {(c.request_id, c.sample_index): c async for c in engine.generate(requests)}


async def tokens_in_flight(engine, num_tokens: int) -> None:
    while sum(len(sample.token_ids) for sample in engine._batch.samples) < num_tokens:
        await asyncio.sleep(0)


def assert_alike(found: Samples, expected: Samples) -> None:
    """Equal tokens; padded products may round their logprobs differently."""
    assert found.keys() == expected.keys()
    for key, completion in found.items():
        assert completion.token_ids.tolist() == expected[key].token_ids.tolist()
        wanted = expected[key].logprobs.tolist()
        assert completion.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)
        assert completion.policy_versions.tolist() == expected[key].policy_versions.tolist()


@given(st.integers(1, 10_000), st.sampled_from([1, LENGTH_STEP]))
def test_sizes_are_few_and_little_larger(number: int, multiple: int) -> None:
    graphs = DecodeGraphs(lambda: RecordingCPU().graph_capture(CPU))
    padded = graphs.padded(number, multiple)
    assert number <= padded < number + max(multiple, number / 4)
    assert padded % multiple == 0
    assert graphs.padded(padded, multiple) == padded
    sizes = {graphs.padded(n, multiple) for n in range(number, 2 * number)}
    assert len(sizes) <= 5
    assert DecodeGraphs(lambda: None).padded(number, multiple) == number


def test_the_second_step_of_a_size_in_succession_is_recorded() -> None:
    platform, counter = RecordingCPU(), torch.zeros(3)
    graphs = DecodeGraphs(lambda: platform.graph_capture(CPU))
    seen = []
    for size in "aababbb":
        graphs.run(size, partial(counter.add_, 1))
        seen.append((platform.num_recorded, platform.num_launches))
    assert seen == [(0, 0), (1, 1), (1, 1), (1, 2), (1, 2), (2, 3), (2, 4)]
    assert counter.tolist() == [7, 7, 7]
    graphs.clear()
    assert platform.num_held == 0


def test_the_least_recently_used_recording_makes_room() -> None:
    platform, counter = RecordingCPU(), torch.zeros(())
    graphs = DecodeGraphs(lambda: platform.graph_capture(CPU))
    for size in range(MAX_NUM_GRAPHS):
        for _ in range(2):
            graphs.run(size, partial(counter.add_, 1))
    for size in (0, "new", "new"):
        graphs.run(size, partial(counter.add_, 1))
    assert platform.num_held == MAX_NUM_GRAPHS
    before = platform.num_launches
    for size in (0, 1, 2):  # 1 is gone
        graphs.run(size, partial(counter.add_, 1))
    assert platform.num_launches == before + 2


def test_the_cache_tells_before_its_buffers_are_replaced() -> None:
    sizes: list[int] = []
    cache = KVCache(4, 100, before_replacing=lambda: sizes.append(cache.size_bytes))
    cache.reserve(2, 5)
    cache.write_prefixes(0, 0, torch.ones(2, 1, 5, 2), torch.ones(2, 1, 5, 2))
    first_bytes = cache.size_bytes
    cache.reserve(2, 6)
    cache.reserve(3, 6)
    grown_bytes = cache.size_bytes
    cache.free()
    assert sizes == [0, first_bytes, grown_bytes]
    assert first_bytes < grown_bytes


Work = Callable[[dict[str, torch.Tensor]], object]


def moved(held: dict[str, torch.Tensor]) -> None:
    held["x"] = held["x"].clone()
    held["x"].add_(1)


def counted(held: dict[str, torch.Tensor]) -> None:
    held["x"].add_(len(held))
    held[f"{len(held)}"] = held["x"]


def read_by_the_host(held: dict[str, torch.Tensor]) -> None:
    held["x"].add_(max(held["x"].tolist()))


def read_as_a_number(held: dict[str, torch.Tensor]) -> None:
    held["x"].add_(int(held["x"].sum()))


def made_by_the_host(held: dict[str, torch.Tensor]) -> None:
    held["x"].add_(torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    "work", [moved, counted, read_by_the_host, read_as_a_number, made_by_the_host]
)
def test_work_that_a_device_cannot_repeat_is_found(work: Work) -> None:
    launch = RecordingCPU().graph_capture(CPU)(partial(work, {"x": torch.zeros(2)}))

    @torch.inference_mode()
    def launched_twice() -> None:
        launch()
        launch()

    with pytest.raises(StaleRecordingError):
        launched_twice()


@pytest.mark.parametrize("case", ["qwen3", "llama-bias", "mistral-window"])
def test_samples_that_come_and_go_are_those_of_single_launches(build_lab, case: str) -> None:
    architecture, changes = {
        "qwen3": ("qwen3", {}),
        "llama-bias": ("llama", {"attention_bias": True, "tie_word_embeddings": False}),
        "mistral-window": ("mistral", {"sliding_window": 8}),
    }[case]
    lab = build_lab(architecture, **changes)
    engine, platform = recording_engine(lab, max_num_sequences=11)
    first = [
        *lab.requests(4, 3, max_new_tokens=40, seed=1),
        *lab.requests(2, 2, max_new_tokens=25, seed=2, temperature=0.0),
    ]
    second = lab.requests(3, 2, max_new_tokens=15, seed=3, top_k=5, top_p=0.8)

    async def overlapping(engine) -> Samples:
        running = asyncio.create_task(collect(engine, first))
        await tokens_in_flight(engine, 60)
        joined = await collect(engine, second)
        return joined | await running

    expected = run(overlapping(lab.engine(max_num_sequences=11)))
    for _ in range(2):
        assert_alike(run(overlapping(engine)), expected)
        assert platform.num_held == 0, "the cache of a finished batch is free"
        # Padding rows stay at position 0, so they write to the first position of their cache row.
        assert not engine._batch._ints_7M[2:4].any()
    assert platform.num_launches > 2 * platform.num_recorded > 0


def test_weights_change_in_place_under_a_recording(long_lab) -> None:
    other = long_lab.other_weights(seed=3)
    requests = long_lab.requests(3, 2, max_new_tokens=40)
    launches: list[tuple[int, int]] = []

    async def updated(engine, platform: RecordingCPU | None = None) -> Samples:
        task = asyncio.create_task(collect(engine, requests))
        await tokens_in_flight(engine, 60)
        await engine.pause()
        await send_weights_async(engine, other.named_parameters(), 7)
        if platform is not None:
            launches.append((platform.num_held, platform.num_recorded))
            await engine.resume()
            await tokens_in_flight(engine, 72)
            launches.append((platform.num_held, platform.num_recorded))
        else:
            await engine.resume()
        return await task

    expected = run(updated(long_lab.engine()))
    engine, platform = recording_engine(long_lab)
    assert_alike(run(updated(engine, platform)), expected)
    assert {v for c in expected.values() for v in c.policy_versions.tolist()} == {0, 7}
    assert launches[0][0] > 0, "recordings outlive an update"
    assert launches[0] == launches[1], "and are used after it"


def test_sleep_drops_recordings_and_their_weights(lab) -> None:
    other = lab.other_weights(seed=5)
    requests = lab.requests(4, 3, max_new_tokens=30)
    engine, platform = recording_engine(lab)
    first = generate_all(engine, requests)
    asyncio.run(engine.sleep())
    assert platform.num_held == 0
    asyncio.run(engine.wake_up(["weights"]))
    lab.send(engine, other, 1)
    asyncio.run(engine.wake_up())
    again = generate_all(engine, requests)
    plain = lab.engine()
    assert [c.token_ids.tolist() for c in first] == [
        c.token_ids.tolist() for c in generate_all(plain, requests)
    ]
    lab.send(plain, other, 1)
    assert [c.token_ids.tolist() for c in again] == [
        c.token_ids.tolist() for c in generate_all(plain, requests)
    ]


def test_padding_stays_within_the_limit_of_the_cache(long_lab, monkeypatch) -> None:
    """Nine rows of 64 positions, which are padded to ten."""
    requests = long_lab.requests(4, 3, max_new_tokens=40, seed=5)
    expected = run(collect(long_lab.engine(), requests))
    limit = 9 * 2 * LENGTH_STEP * POSITION_BYTES
    engine, platform = recording_engine(long_lab, options={"kv_cache_bytes": limit})
    sizes, decode = [], engine._batch.decode

    def noted():
        finished = decode()
        sizes.append(engine._batch._cache.size_bytes)
        return finished

    monkeypatch.setattr(engine._batch, "decode", noted)
    assert_alike(run(collect(engine, requests)), expected)
    assert max(sizes) <= limit
    assert platform.num_launches > 0


def test_a_table_of_angles_that_moves_drops_recordings(build_lab) -> None:
    """A long prompt enlarges the cache, a second one the table; then sizes of before come back."""
    lab = build_lab(eos_token_id=None, max_position_embeddings=400)
    stays = RolloutRequest("stays", (5, 6, 7), SamplingParams(90), (1,))
    one, few = (
        RolloutRequest(f"long {number}", (9,) * 300, SamplingParams(number), (2,))
        for number in (1, 3)
    )

    async def scenario(engine) -> Samples:
        running = asyncio.create_task(collect(engine, [one, stays]))
        await tokens_in_flight(engine, 20)
        joined = await collect(engine, [few])
        return joined | await running

    engine, platform = recording_engine(lab)
    assert_alike(run(scenario(engine)), run(scenario(lab.engine())))
    assert platform.num_recorded > 0


def test_without_memory_for_recordings_steps_run_one_by_one(long_lab, caplog) -> None:
    requests = long_lab.requests(4, 2, max_new_tokens=40)
    expected = run(collect(long_lab.engine(), requests))
    engine, platform = recording_engine(long_lab)
    platform.num_lacking = 2
    assert_alike(run(collect(engine, requests)), expected)
    said = [r for r in caplog.records if "kernel by kernel: CUDA out of memory" in r.message]
    assert len(said) == 1
    assert platform.num_lacking == 0, "a cache that is larger is tried again"
    assert_alike(run(collect(engine, requests)), expected)
    assert platform.num_recorded > 0


def test_eager_engines_and_other_architectures_record_nothing(build_lab) -> None:
    for architecture, options in (("qwen3", {"enforce_eager": True}), ("olmo2", {})):
        lab = build_lab(architecture)
        engine, platform = recording_engine(lab, options=options)
        requests = lab.requests(2, 2)
        assert_alike(run(collect(engine, requests)), run(collect(lab.engine(), requests)))
        assert platform.num_recorded == 0
