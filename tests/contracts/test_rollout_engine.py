"""The contract of a rollout engine, the one that `--engine` names.

Run it in the environment where the engine's library is installed. Uses the public interface alone
and models of a few thousand parameters, tied and untied. Covered: parity of logprobs with a plain
forward pass after every kind of update, also of prompts that were cached before it; incomplete,
wrong and damaged updates; independence of scheduling; versions, also of samples that an update
interrupts; stop and length, abort, pause, sleep, score; refusal without confirmed weights;
deadlines; nothing left behind by `close`. For engines with fault points: that these tests see
what they are for. Not covered: speed, memory, more than one device.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch
from rlhf.testing.rollout_models import (
    CONTEXT_LENGTH,
    EOS,
    GROUPS,
    PREFIX,
    changed,
    largest_difference,
    model,
    receipt_of,
    reference_logprobs,
    tensors_of,
)
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests

from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import wake
from engines.types import Completion, RolloutRequest, SamplingParams
from hardware.cpu import CPUPlatform
from infra.errors import DeadlineError

SHORT_TIMEOUT_S = 20.0
MAX_LOGPROB_DIFFERENCE = 1e-4
WRONG_BY = 1e-2
"""A wrong weight shows by more than this; rounding stays below the other bound."""
FAULTS = {
    "sglang": "sglang.embedding=nan@2,sglang.cache_flush=nan@3",
    "vllm": "vllm.head_refresh=nan@2,vllm.prefix_reset=nan@3",
}
"""What breaks the second and the third update of an engine, by its name."""


@pytest.fixture(scope="module")
def engine_name(request) -> str:
    name = request.config.getoption("--engine")
    row = ROLLOUT_ENGINES.place(name)
    if row.requires:
        pytest.importorskip(row.requires, reason=f"run it in .envs/{row.environment}")
    return name


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request, engine_name, tmp_path_factory) -> Iterator[Served]:
    """An engine that every test of a model shares; each test sends the weights it needs."""
    directory = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        made = Served(engine_name, request.param == "tied", directory, TIMEOUT_S)
    if made.tied:
        can = ", ".join(sorted(c.value for c in made.engine.capabilities)) or "nothing more"
        with request.config.pluginmanager.get_plugin(
            "capturemanager"
        ).global_and_fixture_disabled():
            print(f"{engine_name} on {CPUPlatform.device_name}: {can}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def faulty(engine_name, tmp_path_factory) -> Iterator[Served]:
    """An engine with a short deadline; armed with the faults that there are for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_FAULTS", FAULTS.get(engine_name, ""))
        made = Served(engine_name, True, tmp_path_factory.mktemp("faulty"), SHORT_TIMEOUT_S)
        yield made
        made.close()


def token_ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(c.token_ids.tolist()) for c in completions]


def test_its_row_tells_what_it_can_do(served):
    row = ROLLOUT_ENGINES.place(served.name)
    if row.is_ours or row.capabilities:
        assert {c.value for c in served.engine.capabilities} <= {*row.capabilities}


def test_nothing_is_sampled_without_confirmed_weights(served):
    engine, made = served.engine, model(served.tied, 1)
    if engine.version == -1:  # unless the test is not the first
        with pytest.raises(RolloutError):
            served.generate(requests())
        with pytest.raises(RolloutError):
            served.run(engine.score([(4, 5, 6)], 1.0))
        assert not served.run(engine.health()).can_serve
    with pytest.raises(WeightSyncError):
        served.run(engine.finish_update(0, "0" * 32))
    receipt = served.run(engine.update_weights(served.source(tensors_of(made)), 4))
    assert engine.version == -1
    with pytest.raises(RolloutError):
        served.generate(requests())
    for version, digest in ((5, receipt.digest), (4, "0" * 32)):
        with pytest.raises(WeightSyncError):
            served.run(engine.finish_update(version, digest))
    with pytest.raises(RolloutError):
        served.generate(requests())
    served.run(engine.finish_update(4, receipt.digest))
    assert served.run(engine.health()).can_serve
    assert engine.version == 4
    assert len(served.generate(requests())) == 12


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(served, sampling):
    made, asked = model(served.tied, 2), requests(**sampling)
    served.send(made, 7)
    completions = served.generate(asked)
    assert largest_difference(made, asked, completions) <= MAX_LOGPROB_DIFFERENCE
    assert {v for c in completions for v in c.policy_versions} == {7}


def test_distributions_may_be_mixed_in_one_batch(served):
    made = model(served.tied, 2)
    served.send(made, 0)
    asked = [
        RolloutRequest(f"{t} {k}", (5, 6, 7), SamplingParams(12, temperature=t, top_k=k), (1, 2))
        for t, k in ((0.0, 0), (0.0, 3), (0.5, 0), (1.0, 4), (2.0, 0))
    ]
    completions = served.generate(asked)
    assert largest_difference(made, asked, completions) <= MAX_LOGPROB_DIFFERENCE
    greedy = [c for c in completions if c.request_id.startswith("0.0")]
    assert len({tuple(c.token_ids) for c in greedy}) == 1
    hottest = made(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax()
    assert greedy[0].token_ids[0] == int(hottest)


@pytest.mark.parametrize("group", GROUPS)
def test_an_update_of_one_part_is_served_whole(served, group):
    if group == "head" and served.tied:
        group = "embedding"  # one tensor, in two places
    made = model(served.tied, 3)
    served.send(made, 0)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE
    before = model(served.tied, 3)
    served.send(changed(made, group, 4), 1)
    asked = requests()
    completions = served.generate(asked)
    assert largest_difference(made, asked, completions) <= MAX_LOGPROB_DIFFERENCE
    assert largest_difference(before, asked, completions) > WRONG_BY


def test_incomplete_update_is_refused_and_next_one_works(served):
    made = model(served.tied, 5)
    good = tensors_of(made)
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "missing": {n: t for n, t in good.items() if n != name},
        "unknown": {**good, "model.layers.9.mlp.up_proj.weight": good[name].clone()},
        "shape": {**good, name: good[name][:-1].clone()},
        "dtype": {**good, name: good[name].bfloat16()},
    }
    if served.tied:
        bad["tied name"] = {**good, "lm_head.weight": good["model.embed_tokens.weight"].clone()}
    for tensors in bad.values():
        with pytest.raises(
            WeightSyncError,
            match="lm_head" if "lm_head.weight" in tensors and served.tied else "up_proj",
        ):
            served.run(served.engine.update_weights(served.source(tensors), 1))
        with pytest.raises(RolloutError):
            served.generate(requests())
    served.send(made, 2)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE


def test_a_flipped_bit_is_found(served):
    sent = tensors_of(model(served.tied, 5))
    arrived = {name: tensor.clone() for name, tensor in sent.items()}
    arrived["model.norm.weight"].view(torch.int32)[3] ^= 1
    receipt = served.run(served.engine.update_weights(served.source(arrived), 1))
    assert receipt == receipt_of(arrived)
    with pytest.raises(WeightSyncError):
        served.run(served.engine.finish_update(1, receipt_of(sent).digest))
    with pytest.raises(RolloutError):
        served.generate(requests())


def test_samples_do_not_depend_on_what_else_is_in_flight(served):
    served.send(model(served.tied, 1), 0)
    asked = requests()
    together = token_ids(served.generate(asked))
    alone = [ids for request in asked for ids in token_ids(served.generate([request]))]
    assert together == alone == token_ids(served.generate(asked))
    assert len(set(together)) > 6


def test_seeds_of_any_size_start_streams_of_their_own(served):
    served.send(model(served.tied, 1), 0)
    seeds = (1, 1 + 2**32, 1 + 2**40, 2**63 - 1, 1)
    asked = [RolloutRequest("seeds", (5, 6), SamplingParams(24, temperature=2.0), seeds)]
    found = token_ids(served.generate(asked))
    assert found[0] == found[4]
    assert len(set(found)) == 4


def test_samples_end_at_the_first_eos_or_at_their_limit(served):
    served.send(model(served.tied, 1), 0)
    completions = served.generate(requests(max_new_tokens=40))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert EOS not in c.token_ids[:-1]
        assert c.finish_reason == ("stop" if c.token_ids[-1] == EOS else "length")
        assert len(c.token_ids) == 40 or c.finish_reason == "stop"
        assert len(c.logprobs) == len(c.policy_versions) == len(c.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in c.logprobs.tolist())


def test_requests_that_cannot_be_served_are_refused(served):
    served.send(model(served.tied, 1), 0)
    with pytest.raises(RolloutError):
        served.generate(requests(max_new_tokens=CONTEXT_LENGTH))
    with pytest.raises(RolloutError):
        served.generate([requests()[0], requests()[0]])
    with pytest.raises(RolloutError):
        served.generate([RolloutRequest("a", (32,), SamplingParams(4), (1,))])
    assert len(served.generate(requests())) == 12


def test_score_agrees_with_a_forward_pass(served):
    made = model(served.tied, 2)
    served.send(made, 0)
    sequences = [(4, 5), (6, 7, 8, 9), PREFIX, (*PREFIX, 9, 8, 7)]
    for temperature in (1.0, 0.7):
        found = served.run(served.engine.score(sequences, temperature))
        for ids, logprobs in zip(sequences, found, strict=True):
            request = RolloutRequest("s", ids[:1], SamplingParams(1, temperature), (0,))
            expected = reference_logprobs(made, request, ids[1:])
            assert (torch.tensor(logprobs) - expected).abs().max() <= MAX_LOGPROB_DIFFERENCE


async def until_it_samples(served, num_samples: int = 1) -> None:
    async with asyncio.timeout(60):
        while (await served.engine.health()).num_running < num_samples:
            await asyncio.sleep(0.01)


def test_abort_yields_partial_samples_and_the_engine_goes_on(served):
    served.send(model(served.tied, 1), 0)
    asked = requests(max_new_tokens=250)

    async def scenario(named):
        task = asyncio.create_task(served.collect(asked))
        await until_it_samples(served)
        with pytest.raises(RolloutError):  # the ids are taken
            served.engine.generate(asked)
        await served.engine.abort(named)
        return await task

    assert "abort" in {c.finish_reason for c in served.run(scenario(None))}
    completions = served.run(scenario(["prompt=2"]))
    reasons = {c.request_id for c in completions if c.finish_reason == "abort"}
    assert reasons <= {"prompt=2"}
    assert len(served.generate(requests())) == 12


def test_engine_can_sleep_and_update_after_abort_or_cancel(served):
    served.send(model(served.tied, 1), 0)
    made, asked = model(served.tied, 2), requests(max_new_tokens=250)

    async def begun():
        task = asyncio.create_task(served.collect(asked))
        await until_it_samples(served)
        return task

    async def scenario():
        task = await begun()
        await served.engine.abort()
        await served.engine.sleep("kv")
        await served.engine.wake_up()
        assert len(await task) == 12
        task = await begun()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await served.engine.sleep("kv")
        await served.engine.wake_up()
        task = await begun()
        await served.engine.abort()
        await served.engine.update_weights(served.source(tensors_of(made)), 1)
        assert len(await task) == 12

    served.run(scenario())
    served.send(made, 2)
    assert len(served.generate(requests())) == 12


def test_a_call_that_nobody_waits_for_is_given_up(served):
    served.send(model(served.tied, 1), 0)

    async def scenario():
        stream = served.engine.generate(requests(max_new_tokens=250))
        await anext(stream)
        await stream.aclose()
        while (await served.engine.health()).num_running:
            await asyncio.sleep(0.01)

    served.run(scenario())
    assert len(served.generate(requests())) == 12


def test_pause_and_resume_do_not_change_the_samples(served):
    served.send(model(served.tied, 1), 0)
    expected = token_ids(served.generate(requests()))

    async def scenario(delay_s: float):
        task = asyncio.create_task(served.collect(requests()))
        await asyncio.sleep(delay_s)
        await served.engine.pause()
        running = (await served.engine.health()).num_running
        await asyncio.sleep(0.1)
        assert (await served.engine.health()).num_running == running
        await served.engine.resume()
        return await task

    for delay_s in (0.0, 0.01):
        assert token_ids(served.run(scenario(delay_s))) == expected

    async def paused_before():
        await served.engine.pause()
        task = asyncio.create_task(served.collect(requests()))
        await until_it_samples(served, 12)
        await asyncio.sleep(0.1)
        assert (await served.engine.health()).num_running == 12
        await served.engine.resume()
        return await task

    assert token_ids(served.run(paused_before())) == expected


def test_an_update_between_two_tokens_shows_in_their_versions(served):
    old, new = model(served.tied, 1), model(served.tied, 2)
    served.send(old, 1)
    greedy = SamplingParams(300, temperature=0.0)
    long = [RolloutRequest(f"long={i}", (i,), greedy, (0,)) for i in endless_prompts(old, 3)]
    short = RolloutRequest("short", (5,), SamplingParams(3, temperature=0.0), (0,))
    tensors = tensors_of(new)
    source = served.source(tensors)

    async def scenario():
        engine = served.engine
        stream = engine.generate([short, *long])
        found = [await anext(stream)]
        with pytest.raises(WeightSyncError):  # in flight, and not paused
            await engine.update_weights(source, 2)
        await engine.pause()
        receipt = await engine.update_weights(source, 2)
        await engine.finish_update(2, receipt.digest)
        await engine.resume()
        return found + [completion async for completion in stream]

    completions = {c.request_id: c for c in served.run(scenario())}
    assert len(completions) == 4
    for request in long:
        c = completions[request.request_id]
        num_old = c.policy_versions.tolist().count(1)
        assert c.policy_versions.tolist() == [1] * num_old + [2] * (len(c.token_ids) - num_old)
        assert 0 < num_old < len(c.token_ids), "the samples of a call advance together"
        by = {
            v: reference_logprobs(m, request, c.token_ids.tolist()) for v, m in ((1, old), (2, new))
        }
        expected = torch.cat([by[1][:num_old], by[2][num_old:]])
        assert (torch.tensor(c.logprobs) - expected).abs().max() <= MAX_LOGPROB_DIFFERENCE


def endless_prompts(made, num: int) -> list[int]:
    """Prompts of one token after which a greedy model does not stop."""
    found = []
    for first in range(4, 32):
        ids = [first]
        for _ in range(80):
            ids.append(int(made(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS:
                break
        else:
            found.append(first)
        if len(found) == num:
            return found
    raise AssertionError("the model stops after every prompt; take another seed")


def test_sleep_of_the_weights_asks_for_them_again(served):
    made = model(served.tied, 1)
    served.send(made, 0)
    expected = token_ids(served.generate(requests()))
    served.run(served.engine.sleep())
    with pytest.raises(RolloutError):
        served.generate(requests())
    served.run(served.engine.wake_up())
    with pytest.raises(RolloutError):
        served.generate(requests())
    served.send(made, 1)
    assert token_ids(served.generate(requests())) == expected


def test_weights_awake_alone_take_an_update_unserved(served):
    engine, made = served.engine, model(served.tied, 1)
    served.send(made, 0)
    expected = token_ids(served.generate(requests()))
    served.run(engine.sleep())
    served.run(wake(engine, ["weights"]))
    receipt = served.run(engine.update_weights(served.source(tensors_of(made)), 1))
    with pytest.raises(RolloutError):
        served.generate(requests())
    served.run(wake(engine, ["cache"]))
    served.run(engine.finish_update(1, receipt.digest))
    served.run(wake(engine, ["weights"]))  # awake already
    assert token_ids(served.generate(requests())) == expected


def test_sleep_of_the_cache_keeps_the_weights(served):
    made = model(served.tied, 1)
    served.send(made, 3)
    expected = token_ids(served.generate(requests()))
    served.run(served.engine.sleep("kv"))
    served.run(served.engine.wake_up())
    assert served.engine.version == 3
    assert token_ids(served.generate(requests())) == expected


def test_the_parity_above_sees_a_stale_head_and_a_stale_cache(faulty):
    def shows(difference: float) -> bool:
        """Without fault points the same updates have to be served rightly."""
        if faulty.name in FAULTS:
            return difference > WRONG_BY
        return difference <= MAX_LOGPROB_DIFFERENCE

    made = model(True, 1)
    faulty.send(made, 0)
    assert faulty.parity(made) <= MAX_LOGPROB_DIFFERENCE
    made = changed(made, "embedding", 2)
    faulty.send(made, 1)  # every call says that all is well
    assert shows(faulty.parity(made))
    made = changed(made, "projections", 3)
    faulty.send(made, 2)
    unseen = [replace(requests()[0], prompt_ids=(8,))]
    assert largest_difference(made, unseen, faulty.generate(unseen)) <= MAX_LOGPROB_DIFFERENCE
    assert shows(faulty.parity(made))
    faulty.send(made, 3)
    assert faulty.parity(made) <= MAX_LOGPROB_DIFFERENCE


def test_deadline_and_close(faulty):
    engine = faulty.engine
    faulty.send(model(True, 1), 4)
    faulty.run(engine.pause())
    with pytest.raises(DeadlineError):
        faulty.generate(requests())
    faulty.run(engine.resume())
    assert len(faulty.generate(requests())) == 12
    faulty.run(engine.close())
    assert not faulty.run(engine.health()).can_serve
    with pytest.raises(RolloutError):
        faulty.generate(requests())
    left = set(psutil.Process().children(recursive=True)) - faulty.processes_before
    # Python's own, which ends with this process.
    assert not [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]
