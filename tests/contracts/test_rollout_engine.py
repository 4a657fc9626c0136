"""The contract of a rollout engine; run it on your own with `-k <its name>`.

Every engine the registry knows is checked, those of other distributions included; one whose
library is not installed is skipped and says what it needs. Uses the public interface alone and
a model of a few thousand parameters. Covered: parity of logprobs with a plain forward pass
before and after an update, independence of scheduling, versions, stop and length, abort,
pause and resume, refusal without confirmed weights. Not covered: speed and memory.
"""

import asyncio
import math

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights
from transformers import AutoModelForCausalLM, Qwen3Config

from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.create import create_rollout_engine
from engines.types import RolloutRequest, SamplingParams
from hardware.cpu import CPUPlatform

EOS = 3
TIMEOUT_S = 120.0
MAX_LOGPROB_DIFFERENCE = 1e-4
CONFIG = Qwen3Config(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=48,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=True,
    eos_token_id=EOS,
    pad_token_id=0,
)


def weights(seed: int):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG).eval()


@pytest.fixture(params=ROLLOUT_ENGINES.names())
def new_engine(request, tmp_path):
    """A function that builds an engine without weights."""
    row = ROLLOUT_ENGINES.place(request.param)
    if row.requires:
        pytest.importorskip(row.requires, reason=f"needs pip install 'rlhf-pipeline[{row.extra}]'")
    CONFIG.save_pretrained(tmp_path)

    def build(**settings):
        rollout = RolloutConfig(engine=request.param, timeout_s=TIMEOUT_S, **settings)
        return create_rollout_engine(request.param, tmp_path, rollout, "float32", CPUPlatform())

    return build


def send(engine, model, version: int) -> None:
    send_weights(engine, model.named_parameters(), version)


def requests(max_new_tokens: int = 16, **sampling) -> list[RolloutRequest]:
    prompts = [(5,), (6, 7, 8, 9, 10, 11, 12), (13, 14, 15)]
    return [
        RolloutRequest(
            f"prompt={index}",
            prompt,
            SamplingParams(max_new_tokens, **sampling),
            tuple(100 * index + sample for sample in range(3)),
        )
        for index, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def reference_logprobs(model, request, token_ids) -> torch.Tensor:
    ids = torch.tensor([[*request.prompt_ids, *token_ids]])
    logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    temperature = request.sampling.temperature or 1.0
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]


def difference(model, asked, completions) -> float:
    by_id = {request.request_id: request for request in asked}
    return max(
        float(
            (reference_logprobs(model, by_id[c.request_id], c.token_ids) - torch.tensor(c.logprobs))
            .abs()
            .max()
        )
        for c in completions
    )


def run(coroutine):
    async def with_deadline():
        async with asyncio.timeout(TIMEOUT_S):
            return await coroutine

    return asyncio.run(with_deadline())


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logprobs_are_those_of_the_weights_that_were_sent(new_engine, temperature):
    engine = new_engine()
    for version, seed in enumerate((1, 2)):
        model = weights(seed)
        send(engine, model, version)
        assert engine.version == version
        asked = requests(temperature=temperature)
        completions = generate_all(engine, asked, TIMEOUT_S)
        assert difference(model, asked, completions) <= MAX_LOGPROB_DIFFERENCE
        assert {v for c in completions for v in c.policy_versions} == {version}


def test_samples_do_not_depend_on_what_else_is_in_flight(new_engine):
    model, asked = weights(1), requests()
    wide, narrow = new_engine(), new_engine(max_num_sequences=2)
    send(wide, model, 0)
    send(narrow, model, 0)
    together = [c.token_ids for c in generate_all(wide, asked, TIMEOUT_S)]
    two_at_a_time = [c.token_ids for c in generate_all(narrow, asked, TIMEOUT_S)]
    alone = [c.token_ids for r in asked for c in generate_all(wide, [r], TIMEOUT_S)]
    assert together == two_at_a_time == alone
    assert len(set(together)) > 1


def test_samples_end_at_the_first_eos_or_at_their_limit(new_engine):
    engine = new_engine()
    send(engine, weights(1), 0)
    completions = generate_all(engine, requests(max_new_tokens=40), TIMEOUT_S)
    assert len(completions) == 9
    for c in completions:
        assert EOS not in c.token_ids[:-1]
        assert c.finish_reason == ("stop" if c.token_ids[-1] == EOS else "length")
        assert len(c.token_ids) == 40 or c.finish_reason == "stop"
        assert len(c.logprobs) == len(c.policy_versions) == len(c.token_ids)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in c.logprobs)


def test_nothing_is_sampled_without_confirmed_weights(new_engine):
    engine = new_engine()
    assert engine.version == -1
    with pytest.raises(RolloutError):
        generate_all(engine, requests(), TIMEOUT_S)
    named = list(weights(1).named_parameters())
    with pytest.raises(WeightSyncError):
        send_weights(engine, named[:-1], 0)
    with pytest.raises(RolloutError):
        generate_all(engine, requests(), TIMEOUT_S)
    with pytest.raises(WeightSyncError):
        run(engine.finish_update(0, "0" * 32))
    send_weights(engine, named, 0)
    assert run(engine.health()).can_serve
    assert len(generate_all(engine, requests(), TIMEOUT_S)) == 9


def test_a_prompt_without_room_is_refused(new_engine):
    engine = new_engine()
    send(engine, weights(1), 0)
    with pytest.raises(RolloutError):
        generate_all(engine, requests(max_new_tokens=CONFIG.max_position_embeddings), TIMEOUT_S)


def test_abort_yields_partial_samples_and_the_engine_goes_on(new_engine):
    engine = new_engine()
    send(engine, weights(1), 0)
    long = [r for r in requests(max_new_tokens=100)]

    async def scenario():
        completions = []

        async def consume():
            async for completion in engine.generate(long):
                completions.append(completion)

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort()
        await task
        return completions

    completions = run(scenario())
    assert len(completions) == 9
    assert "abort" in {c.finish_reason for c in completions}
    assert len(generate_all(engine, requests(), TIMEOUT_S)) == 9


def test_pause_and_resume_do_not_change_the_samples(new_engine):
    engine = new_engine()
    send(engine, weights(1), 0)
    expected = [c.token_ids for c in generate_all(engine, requests(), TIMEOUT_S)]

    async def scenario():
        await engine.pause()
        completions = []

        async def consume():
            async for completion in engine.generate(requests()):
                completions.append(completion)

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        assert not completions
        await engine.resume()
        await task
        return sorted(completions, key=lambda c: (c.request_id, c.sample_index))

    assert [c.token_ids for c in run(scenario())] == expected


def test_sleep_and_wake_up_ask_for_the_weights_again(new_engine):
    engine, model = new_engine(), weights(1)
    send(engine, model, 0)
    expected = [c.token_ids for c in generate_all(engine, requests(), TIMEOUT_S)]
    run(engine.sleep())
    with pytest.raises(RolloutError):
        generate_all(engine, requests(), TIMEOUT_S)
    run(engine.wake_up())
    send(engine, model, 1)
    assert [c.token_ids for c in generate_all(engine, requests(), TIMEOUT_S)] == expected
    run(engine.close())
    assert not run(engine.health()).can_serve
