"""What happens around sampling: joining, pausing, updating, aborting, sleeping, closing."""

import asyncio

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights_async

from engines.errors import RolloutError, WeightSyncError
from engines.types import RolloutRequest, SamplingParams
from infra.errors import DeadlineError

TIMEOUT_S = 30.0


def run(coroutine):
    async def with_deadline():
        async with asyncio.timeout(TIMEOUT_S):
            return await coroutine

    return asyncio.run(with_deadline())


def key(completion) -> tuple[str, int]:
    return completion.request_id, completion.sample_index


async def collect(engine, requests) -> dict:
    return {key(c): c async for c in engine.generate(requests)}


async def spin(num_turns: int = 20) -> None:
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def steps_until(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


def tokens_in_flight(engine) -> int:
    return sum(len(sample.token_ids) for sample in engine._batch.samples)


def test_requests_join_a_running_batch_and_leave_it_alone(long_lab):
    first = long_lab.requests(3, 2, max_new_tokens=30, seed=1)
    second = long_lab.requests(3, 2, max_new_tokens=8, seed=2)
    engine = long_lab.engine()
    alone = run(collect(engine, first)) | run(collect(engine, second))

    async def scenario():
        running = asyncio.create_task(collect(engine, first))
        await steps_until(lambda: tokens_in_flight(engine) > 20)
        joined = asyncio.create_task(collect(engine, second))
        await steps_until(lambda: len(engine._batch.samples) == 12)
        return await joined, running.done(), await running

    joined, first_done, rest = run(scenario())
    assert not first_done  # the short ones came out while the long ones were running
    together = joined | rest
    assert {k: c.token_ids.tolist() for k, c in together.items()} == {
        k: c.token_ids.tolist() for k, c in alone.items()
    }


def test_completions_come_as_they_finish(long_lab):
    short = RolloutRequest("short", (5,), SamplingParams(2), (1,))
    long = RolloutRequest("long", (6, 7), SamplingParams(25), (1,))
    engine = long_lab.engine()

    async def scenario():
        stream = engine.generate([long, short])
        return [(c.request_id, len(engine._batch.samples)) async for c in stream]

    assert run(scenario()) == [("short", 1), ("long", 0)]


def test_pause_stops_between_two_tokens_and_resume_continues(long_lab):
    requests = long_lab.requests(4, 2, max_new_tokens=30)
    engine = long_lab.engine()
    expected = run(collect(engine, requests))

    async def scenario():
        task = asyncio.create_task(collect(engine, requests))
        await steps_until(lambda: tokens_in_flight(engine) > 50)
        await engine.pause()
        at_pause = tokens_in_flight(engine)
        await spin()
        assert tokens_in_flight(engine) == at_pause
        assert not task.done()
        await engine.resume()
        return await task

    assert run(scenario()) == expected


def test_every_token_carries_the_version_that_sampled_it(long_lab):
    requests = long_lab.requests(3, 2, max_new_tokens=30)
    engine = long_lab.engine(max_num_sequences=5)  # the last sample's prompt is held for it
    other = long_lab.other_weights(seed=3)

    async def scenario():
        task = asyncio.create_task(collect(engine, requests))
        await steps_until(lambda: tokens_in_flight(engine) > 40)
        await engine.pause()
        await send_weights_async(engine, other.named_parameters(), 7)
        await engine.resume()
        return await task

    completions = run(scenario())
    by_id = {request.request_id: request for request in requests}
    crossing = 0
    for completion in completions.values():
        versions = completion.policy_versions.tolist()
        split = versions.count(0)
        assert versions == [0] * split + [7] * (30 - split)
        crossing += 0 < split < 30
        request = by_id[completion.request_id]
        old = long_lab.teacher_forced(long_lab.model, request, completion.token_ids.tolist())
        new = long_lab.teacher_forced(other, request, completion.token_ids.tolist())
        expected = torch.cat([old[:split], new[split:]])
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
    assert crossing == 5


def test_weights_do_not_change_under_a_running_batch(long_lab):
    engine = long_lab.engine()

    async def scenario():
        task = asyncio.create_task(collect(engine, long_lab.requests(2, 2, max_new_tokens=30)))
        await steps_until(lambda: len(engine._batch.samples) == 4)
        with pytest.raises(WeightSyncError, match="in flight"):
            await engine.update_weights(Held(long_lab.model), 1)
        return await task

    assert {v for c in run(scenario()).values() for v in c.policy_versions} == {0}


@pytest.mark.parametrize("paused", [False, True])
def test_abort_gives_the_partial_sample_and_spares_the_others(long_lab, paused):
    requests = long_lab.requests(3, 2, max_new_tokens=30)
    engine = long_lab.engine(max_num_sequences=5)  # one sample of the last request waits
    expected = run(collect(engine, requests))
    aborted_id = requests[1].request_id

    async def scenario():
        task = asyncio.create_task(collect(engine, requests))
        await steps_until(lambda: tokens_in_flight(engine) > 40)
        if paused:
            await engine.pause()
        await engine.abort([aborted_id])
        if paused:
            await engine.resume()
        return await task

    found = run(scenario())
    assert found.keys() == expected.keys()
    for name, completion in found.items():
        full = expected[name]
        if completion.request_id == aborted_id:
            assert completion.finish_reason == "abort"
            assert 0 < len(completion.token_ids) < 30
            assert (
                completion.token_ids.tolist()
                == full.token_ids[: len(completion.token_ids)].tolist()
            )
        else:
            assert completion.token_ids.tolist() == full.token_ids.tolist()
            assert completion.finish_reason == "length"


def test_abort_of_everything_reaches_waiting_samples(long_lab):
    engine = long_lab.engine(max_num_sequences=2)

    async def scenario():
        task = asyncio.create_task(collect(engine, long_lab.requests(3, 2, max_new_tokens=30)))
        await steps_until(lambda: tokens_in_flight(engine) > 5)
        await engine.abort()
        return await task

    found = run(scenario())
    assert [c.finish_reason for c in found.values()] == ["abort"] * 6
    assert sorted(len(c.token_ids) > 0 for c in found.values()) == [False] * 4 + [True] * 2


def test_aborted_prompt_is_not_reused_by_an_unrelated_request(long_lab):
    """A held prompt must never be taken for that of a later request."""
    engine = long_lab.engine(max_num_sequences=2)

    async def scenario():
        task = asyncio.create_task(collect(engine, long_lab.requests(1, 5, max_new_tokens=30)))
        await steps_until(lambda: tokens_in_flight(engine) > 5)
        await engine.abort()
        await task
        later = long_lab.requests(2, 3, max_new_tokens=10, seed=8)
        return later, await collect(engine, later)

    later, found = run(scenario())
    assert long_lab.worst_difference(long_lab.model, later, list(found.values())) <= 1e-5


def test_a_caller_that_goes_away_leaves_nothing_behind(long_lab):
    engine = long_lab.engine()
    requests = [
        RolloutRequest("short", (5,), SamplingParams(1), (1,)),
        *long_lab.requests(2, 2, max_new_tokens=30),
    ]

    async def scenario():
        stream = engine.generate(requests)
        async for _ in stream:
            break
        await stream.aclose()
        return len(engine._batch.samples), len(engine._scheduler.waiting)

    assert run(scenario()) == (0, 0)
    assert len(generate_all(engine, requests)) == 5  # and the ids are free again


def test_deadline_of_the_engine(long_lab):
    engine = long_lab.engine(timeout_s=0.05)

    async def scenario():
        await engine.pause()
        with pytest.raises(DeadlineError, match="6 samples of 3 requests"):
            await collect(engine, long_lab.requests(3, 2))
        await engine.resume()
        return len(engine._batch.samples), len(engine._scheduler.waiting)

    assert run(scenario()) == (0, 0)


def test_deadline_of_the_caller(long_lab):
    engine = long_lab.engine()
    asyncio.run(engine.pause())
    with pytest.raises(DeadlineError, match="4 samples"):
        generate_all(engine, long_lab.requests(2, 2), timeout_s=0.05)
    assert not engine._scheduler.waiting


def test_the_cache_is_freed_when_the_last_sample_is_out(long_lab):
    engine, sizes = long_lab.engine(), []

    async def scenario():
        async for _ in engine.generate(long_lab.requests(2, 2)):
            sizes.append(engine._batch._cache.size_bytes)

    asyncio.run(scenario())
    assert len(sizes) == 4
    assert sizes[-1] == 0
    assert engine._batch._cache.size_bytes == 0


def test_sleep_frees_memory_and_asks_for_new_weights(long_lab):
    requests = long_lab.requests(2, 2)
    engine = long_lab.engine()
    expected = generate_all(engine, requests)
    asyncio.run(engine.sleep())
    assert sum(p.numel() for p in engine._model._model.parameters()) == 0
    assert not asyncio.run(engine.health()).can_serve
    with pytest.raises(RolloutError, match="asleep"):
        generate_all(engine, requests)
    with pytest.raises(WeightSyncError, match="asleep"):
        long_lab.send(engine, long_lab.model, 1)
    asyncio.run(engine.wake_up())
    with pytest.raises(RolloutError, match="no confirmed weights"):
        generate_all(engine, requests)
    long_lab.send(engine, long_lab.model, 0)
    assert generate_all(engine, requests) == expected
    assert asyncio.run(engine.health()).can_serve


class Held:
    """Weights that are just there."""

    checksum_method = "xxh3"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def tensors(self):
        return ((name, p.detach()) for name, p in self._model.named_parameters())


def test_nothing_is_sampled_before_the_first_confirmed_update(lab):
    engine = lab.bare_engine()
    assert engine.version == -1
    with pytest.raises(RolloutError, match="no confirmed weights"):
        engine.generate(lab.requests(1, 1))
    digest = asyncio.run(engine.update_weights(Held(lab.model), 4)).digest
    with pytest.raises(RolloutError, match="no confirmed weights"):
        engine.generate(lab.requests(1, 1))
    with pytest.raises(WeightSyncError, match="digest"):
        asyncio.run(engine.finish_update(4, "0" * 32))
    with pytest.raises(WeightSyncError, match="version 5"):
        asyncio.run(engine.finish_update(5, digest))
    asyncio.run(engine.finish_update(4, digest))
    assert engine.version == 4
    with pytest.raises(WeightSyncError, match="no complete update"):
        asyncio.run(engine.finish_update(4, digest))


def test_close_ends_what_is_in_flight(long_lab):
    engine = long_lab.engine()

    async def scenario():
        task = asyncio.create_task(collect(engine, long_lab.requests(2, 2, max_new_tokens=30)))
        await steps_until(lambda: tokens_in_flight(engine) > 5)
        await engine.close()
        await engine.close()
        return await task

    assert {c.finish_reason for c in run(scenario()).values()} == {"abort"}
    with pytest.raises(RolloutError, match="closed"):
        engine.generate(long_lab.requests(1, 1))


def test_an_empty_list_of_requests_is_done_at_once(lab):
    assert generate_all(lab.engine(), []) == []


def test_a_request_id_may_be_in_flight_once(long_lab):
    """Refused at the call, before either is iterated: check and entry are one step."""
    (request,) = long_lab.requests(1, 2, max_new_tokens=5)
    engine = long_lab.engine()
    with pytest.raises(RolloutError, match="sample 0 is requested twice, or is in flight"):
        engine.generate([request, request])

    async def scenario():
        first = engine.generate([request])
        with pytest.raises(RolloutError, match="sample 0 is requested twice, or is in flight"):
            engine.generate([request])
        served = [c.sample_index async for c in first]
        return sorted(served), len(await collect(engine, [request]))

    assert run(scenario()) == ([0, 1], 2)
