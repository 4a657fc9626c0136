"""Samples that were cut short and go on, in models of full and of sliding attention."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from rlhf.testing.rollout_calls import generate_all, send_weights_async

from engines.checkpoint.hub_names import HubNames
from engines.types import Completion, RolloutRequest, SamplingParams

WINDOWS = {
    "qwen3": {},
    # Shorter than the prompts and shorter than the answers; in every layer, and in some.
    "mistral": {"sliding_window": 5},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "query_pre_attn_scalar": 11,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}
LENGTH = 30


@pytest.fixture(params=list(WINDOWS))
def windowed(request, build_lab):
    return build_lab(request.param, eos_token_id=None, **WINDOWS[request.param])


def asked(lab, num_samples: int = 3) -> list[RolloutRequest]:
    """Two prompts longer than every window, that begin alike, and one of a single token."""
    shared = tuple(4 + 3 * i % 20 for i in range(17))
    sampling = SamplingParams(LENGTH, temperature=0.8)
    return [
        RolloutRequest(f"{i}", prompt, sampling, tuple(range(10 * i, 10 * i + num_samples)))
        for i, prompt in enumerate([shared, (*shared, 9, 8), (7,)])
    ]


def rest_of(requests: Sequence[RolloutRequest], whole: Sequence[Completion], cut: int):
    """The same samples behind their first tokens, a different number of them for each."""
    return [
        replace(
            request,
            prefixes=tuple(
                c.token_ids[: cut + 2 * c.sample_index].tolist()
                for c in whole
                if c.request_id == request.request_id
            ),
        )
        for request in requests
    ]


@pytest.mark.parametrize("cut", [0, 1, 8, 25])
def test_a_sample_goes_on_as_if_it_had_not_been_cut(windowed, cut: int):
    engine, requests = windowed.engine(), asked(windowed)
    whole = generate_all(engine, requests)
    assert windowed.worst_difference(windowed.model, requests, whole) <= 1e-5
    rests = generate_all(engine, rest_of(requests, whole, cut))
    for rest, full in zip(rests, whole, strict=True):
        given = cut + 2 * full.sample_index
        assert rest.token_ids.tolist() == full.token_ids[given:].tolist()
        assert rest.logprobs.tolist() == pytest.approx(full.logprobs[given:].tolist(), abs=1e-5)
        assert len(rest.policy_versions) == LENGTH - given
        assert rest.finish_reason == "length"


def test_without_its_offset_a_sample_would_repeat_its_draws(lab):
    """What the offset is for: the same tokens as a prompt begin the stream again."""
    flat = lab.other_weights(1)
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.zero_()
    engine = lab.engine()
    lab.send(engine, flat, 1)
    request = RolloutRequest("r", (5,), SamplingParams(16), (0, 1, 2, 4))
    whole = [c for c in generate_all(engine, [request]) if len(c.token_ids) == 16]
    assert whole
    for full in whole:
        again = RolloutRequest(
            "again",
            (5, *full.token_ids[:8].tolist()),
            SamplingParams(8),
            (request.seeds[full.sample_index],),
        )
        [repeated] = generate_all(engine, [again])
        assert repeated.token_ids.tolist() == full.token_ids[:8].tolist()
        [rest] = generate_all(engine, [replace(again, draw_offsets=(8,))])
        assert rest.token_ids.tolist() == full.token_ids[8:].tolist()


def test_a_few_random_numbers_may_be_skipped(lab):
    """An offset is a number of draws, not of tokens that stand somewhere."""
    request = RolloutRequest("r", (5, 6), SamplingParams(1, temperature=2.0), (3,))
    tokens = {
        tuple(generate_all(lab.engine(), [replace(request, draw_offsets=(offset,))])[0].token_ids)
        for offset in range(12)
    }
    assert len(tokens) > 2


def test_samples_with_and_without_prefixes_share_a_batch(windowed):
    engine, requests = windowed.engine(max_num_sequences=4), asked(windowed)
    whole = generate_all(engine, requests)
    mixed = [
        replace(r, prefixes=((), *rest.prefixes[1:]))
        for r, rest in zip(requests, rest_of(requests, whole, 6), strict=True)
    ]
    for found, full in zip(generate_all(engine, mixed), whole, strict=True):
        given = 6 + 2 * full.sample_index if full.sample_index else 0
        assert found.token_ids.tolist() == full.token_ids[given:].tolist()


def test_an_update_in_the_middle_of_a_continued_sample(windowed):
    """Windows are computed anew from the new weights, the prefix included."""
    engine, requests = windowed.engine(max_num_sequences=16), asked(windowed)
    whole = generate_all(engine, requests)
    rest = rest_of(requests, whole, 4)
    other = windowed.other_weights(seed=11)

    async def scenario():
        stream = engine.generate(rest)
        first = asyncio.ensure_future(anext(stream))
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.pause()
        named = HubNames(other).stream(other.named_parameters())
        await send_weights_async(engine, named, 1)
        await engine.resume()
        return [await first, *[c async for c in stream]]

    found = asyncio.run(scenario())
    assert {version for c in found for version in c.policy_versions} == {0, 1}
    by_id = {request.request_id: request for request in rest}
    for c in found:
        request = by_id[c.request_id]
        given = request.prefix(c.sample_index)
        full = (*given, *c.token_ids.tolist())
        by_version = [
            windowed.teacher_forced(model, request, full)[len(given) :]
            for model in (windowed.model, other)
        ]
        num_old = c.policy_versions.tolist().count(0)
        assert c.policy_versions.tolist() == [0] * num_old + [1] * (len(c.token_ids) - num_old)
        expected = torch.cat([by_version[0][:num_old], by_version[1][num_old:]])
        assert (expected - torch.tensor(c.logprobs)).abs().max() <= 1e-5


def test_a_window_hides_what_is_before_it(build_lab):
    """The tests above can tell a window from none."""
    lab = build_lab("mistral", eos_token_id=None, sliding_window=5)
    requests = asked(lab)
    completions = generate_all(lab.engine(), requests)
    lab.model.config.sliding_window = None
    for layer in lab.model.model.layers:
        layer.self_attn.sliding_window = None
    lab.model.config.layer_types = None
    assert lab.worst_difference(lab.model, requests, completions) > 0.01
