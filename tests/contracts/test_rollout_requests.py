"""The contract of a rollout engine about requests: what continues, what ends, what counts once.

For the engine that `--engine` names, as in test_rollout_engine, which has the rest. Covered:
samples that continue a prefix, their random streams, samples by index, each accepted once; stop
tokens and stop strings, also across the end of a prefix; structured output, or its refusal; 256
requests at a time with a shared prefix.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
import torch
from rlhf.testing.rollout_models import (
    EOS,
    PAD,
    PREFIX,
    TEXTS,
    largest_difference,
    model,
    reference_logprobs,
    text_of,
    write_tokenizer,
)
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests
from rlhf.testing.test_rollout_engine import MAX_LOGPROB_DIFFERENCE, engine_name, token_ids

from engines.errors import RolloutError
from engines.rollout.base import Capability
from engines.types import Completion, RolloutRequest, SamplingParams, StructuredOutput

__all__ = ["engine_name"]  # pytest finds the fixture by its name in this module

NUM_CONCURRENT = 256


@pytest.fixture(scope="module")
def served(engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("requests")
    write_tokenizer(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        made = Served(engine_name, True, directory, TIMEOUT_S, NUM_CONCURRENT)
    made.send(model(True, 1), 0)
    yield made
    made.close()


@pytest.fixture
def flat(served: Served) -> Iterator[Served]:
    """Weights under which every token is as likely: samples show the random numbers alone."""
    made = model(True, 1)
    for parameter in made.parameters():
        parameter.data.zero_()
    served.send(made, 1)
    yield served
    served.send(model(True, 1), 0)


def continued(request: RolloutRequest, first: list[Completion], num: int) -> RolloutRequest:
    """The samples of a request that are longer than so many tokens, behind these."""
    return request.behind(
        [
            Completion(
                c.request_id,
                c.sample_index,
                c.token_ids[:num],
                c.logprobs[:num],
                c.policy_versions[:num],
                c.finish_reason,
            )
            for c in first
            if c.request_id == request.request_id and len(c.token_ids) > num
        ]
    )


@pytest.mark.parametrize("num_given", [1, 8])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 5}], ids=str)
def test_a_continued_sample_goes_on_where_it_was_cut(served: Served, sampling, num_given: int):
    asked = requests(24, **sampling)
    whole = {(c.request_id, c.sample_index): c for c in served.generate(asked)}
    again = [continued(request, list(whole.values()), num_given) for request in asked]
    again = [request for request in again if request.seeds]
    rests = served.run(gather(served, again))
    assert rests
    exact = Capability.EXACT_CONTINUATION in served.engine.capabilities or "temperature" in sampling
    made = model(True, 1)
    by_id = {request.request_id: request for request in asked}
    for rest in rests:
        full = whole[rest.request_id, rest.sample_index]
        request, given = by_id[rest.request_id], full.token_ids[:num_given].tolist()
        if exact:
            assert given + rest.token_ids.tolist() == full.token_ids.tolist()
            assert rest.finish_reason == full.finish_reason
        assert num_given + len(rest.token_ids) <= 24
        assert (rest.finish_reason == "stop") == (rest.token_ids[-1] == EOS)
        expected = reference_logprobs(made, request, given + rest.token_ids.tolist())[num_given:]
        assert (torch.tensor(rest.logprobs) - expected).abs().max() <= MAX_LOGPROB_DIFFERENCE
        assert rest.policy_versions.tolist() == [0] * len(rest.token_ids)
    assert token_ids(served.run(gather(served, again))) == token_ids(rests)


async def gather(served: Served, asked: list[RolloutRequest]) -> list[Completion]:
    """All completions, sorted; those of a request need not be numbered from 0."""
    found = [completion async for completion in served.engine.generate(asked)]
    found.sort(key=lambda c: (c.request_id, c.sample_index))
    wanted = sorted(key for request in asked for key in request.sample_keys)
    assert [(c.request_id, c.sample_index) for c in found] == wanted
    return found


def test_a_continued_sample_repeats_no_draw(flat: Served):
    request = RolloutRequest("flat", (5,), SamplingParams(24), tuple(range(8)))
    whole = flat.generate([request])
    num = 4
    rest = flat.run(gather(flat, [continued(request, whole, num)]))
    exact = Capability.EXACT_CONTINUATION in flat.engine.capabilities
    num_same = num_compared = 0
    for completion in rest:
        full = whole[completion.sample_index].token_ids.tolist()
        repeated = list(zip(completion.token_ids.tolist(), full, strict=False))
        num_compared += len(repeated)
        num_same += sum(one == other for one, other in repeated)
        assert not exact or full[num:] == completion.token_ids.tolist()
    assert num_compared > 40
    assert num_same / num_compared < 0.2  # by chance 1 of 32


def test_what_an_abort_cut_short_is_put_together(served: Served):
    asked = RolloutRequest("cut", (5, 6), SamplingParams(200), (11, 12, 13, 14))
    expected = served.generate([asked])
    made = model(True, 1)

    async def scenario():
        stream = served.engine.generate([asked])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.03)
        await served.engine.abort(["cut"])
        return [await first, *[c async for c in stream]]

    found = served.run(scenario())
    whole = {c.sample_index: c for c in found if c.finish_reason != "abort"}
    partials = [c for c in found if c.finish_reason == "abort"]
    rests = served.run(gather(served, [asked.behind(partials)] if partials else []))
    by_index = {c.sample_index: c for c in partials}
    whole |= {c.sample_index: by_index[c.sample_index].then(c) for c in rests}
    for place, full in enumerate(expected):
        c = whole[place]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == EOS)
        assert len(c.token_ids) == len(c.logprobs) == len(c.policy_versions) <= 200
        logprobs = reference_logprobs(made, asked, c.token_ids.tolist())
        assert (torch.tensor(c.logprobs) - logprobs).abs().max() <= MAX_LOGPROB_DIFFERENCE
        if Capability.EXACT_CONTINUATION in served.engine.capabilities:
            assert (c.token_ids.tolist(), c.finish_reason) == (
                full.token_ids.tolist(),
                full.finish_reason,
            )


def test_an_offset_stands_for_tokens_in_the_prompt(served: Served):
    given = (9, 8, 7, 6)
    request = RolloutRequest(
        "offset", (5, 6), SamplingParams(16), (3, 4), prefixes=(given, given[:2])
    )
    behind_prefix = served.run(gather(served, [request]))
    for place, completion in enumerate(behind_prefix):
        prefix = request.prefix(place)
        plain = RolloutRequest(
            "plain",
            (5, 6, *prefix),
            SamplingParams(16 - len(prefix)),
            (request.seeds[place],),
            draw_offsets=(len(prefix),),
        )
        assert token_ids(served.generate([plain])) == token_ids([completion])


def test_some_samples_of_a_request_are_those_of_the_whole(served: Served):
    whole = RolloutRequest("whole", PREFIX, SamplingParams(16), (1, 2, 3, 4), session="s", turn=2)
    expected = served.generate([replace(whole, session=None, turn=0)])
    some = whole.select((3, 1))
    assert (some.seeds, some.sample_indices) == ((4, 2), (3, 1))
    found = served.run(gather(served, [some]))
    assert [(c.sample_index, c.token_ids.tolist()) for c in found] == [
        (index, expected[index].token_ids.tolist()) for index in (1, 3)
    ]


def test_a_sample_is_accepted_once(served: Served):
    asked = RolloutRequest("once", (5, 6), SamplingParams(200), (1, 2, 3))
    other = replace(asked, seeds=(9,), sample_indices=(7,))

    async def scenario():
        stream = served.engine.generate([asked])
        for again in (asked, replace(asked, seeds=(3,), sample_indices=(2,))):
            with pytest.raises(RolloutError, match="in flight"):
                served.engine.generate([again])
        with pytest.raises(RolloutError, match="in flight"):
            served.engine.generate([other, other])
        first = await anext(stream)
        out = replace(asked, seeds=(1,), sample_indices=(first.sample_index,))
        with pytest.raises(RolloutError, match="in flight"):
            served.engine.generate([out])
        beside = await gather(served, [other])
        return [first, *[completion async for completion in stream]], beside

    found, beside = served.run(scenario())
    assert sorted(c.sample_index for c in found) == [0, 1, 2]
    assert [c.sample_index for c in beside] == [7]
    expected = sorted(found, key=lambda c: c.sample_index)
    assert token_ids(served.generate([asked])) == token_ids(expected)


def test_what_a_lost_call_asked_for_is_served_once_to_the_next(served: Served):
    """A call that is given up, by its caller or by an abort, leaves nothing to the next one."""
    asked = RolloutRequest("lost", (5, 6), SamplingParams(200), (11, 12, 13))
    expected = token_ids(served.generate([asked]))

    async def scenario(give_up):
        stream = served.engine.generate([asked])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        await give_up(stream, first)
        return await served.collect([asked])  # at once

    async def never_awaited():
        served.engine.generate([asked])
        await asyncio.sleep(0.01)
        return await served.collect([asked])

    assert token_ids(served.run(never_awaited())) == expected

    async def closed(stream, first):
        await first
        await stream.aclose()

    async def cancelled(stream, first):
        if not first.cancel():  # a sample had come already
            await stream.aclose()
        await asyncio.gather(first, return_exceptions=True)

    async def aborted(stream, first):
        await served.engine.abort(["lost"])
        rows = [await first, *[c async for c in stream]]
        assert sorted(c.sample_index for c in rows) == [0, 1, 2]

    for give_up in (closed, cancelled, aborted):
        assert token_ids(served.run(scenario(give_up))) == expected


def test_stop_tokens_end_samples_and_change_nothing_else(served: Served):
    free = served.generate(requests(40))
    stops = (7, 19)
    ended = served.generate(requests(40, stop_token_ids=stops))
    assert token_ids(ended) != token_ids(free)
    for one, other in zip(ended, free, strict=True):
        end = next((n for n, t in enumerate(other.token_ids.tolist(), 1) if t in stops), None)
        assert one.token_ids.tolist() == other.token_ids[:end].tolist()
        assert one.finish_reason == ("stop" if end else other.finish_reason)
        assert len(one.logprobs) == len(one.policy_versions) == len(one.token_ids)
        assert one.logprobs.tolist() == pytest.approx(other.logprobs[:end].tolist(), abs=1e-5)


def first_end(ids: tuple[int, ...], stop: tuple[str, ...]) -> int | None:
    """By decoding every beginning of a sample anew."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(text in text_of(ids[:n]) for text in stop)), None
    )


def test_stop_string_ends_sample_at_its_completing_token(served: Served):
    free = served.generate(requests(40))
    # Of two tokens each, from several samples, and one that never comes.
    stop = (*(text_of(c.token_ids[6:8].tolist()) for c in free[::4] if len(c.token_ids) > 8), "?")
    assert "" not in stop
    assert len(stop) > 2
    ended = served.generate(requests(40, stop=stop))
    num_ended = 0
    for one, other in zip(ended, free, strict=True):
        end = first_end(other.token_ids.tolist(), stop)
        num_ended += end is not None
        assert one.token_ids.tolist() == other.token_ids[:end].tolist()
        assert one.finish_reason == ("stop" if end else other.finish_reason)
        assert len(one.logprobs) == len(one.policy_versions) == len(one.token_ids)
        assert one.logprobs.tolist() == pytest.approx(other.logprobs[:end].tolist(), abs=1e-5)
    assert num_ended > 1


def test_the_text_of_a_special_token_stops_at_the_token(served: Served):
    free = served.generate(requests(40))
    ended = served.generate(requests(40, stop=(TEXTS[PAD],)))
    as_id = served.generate(requests(40, stop_token_ids=(PAD,)))
    assert token_ids(ended) == token_ids(as_id) != token_ids(free)
    part = served.generate(requests(40, stop=(TEXTS[PAD][1:-1],)))
    assert token_ids(part) == token_ids(free)


def test_a_stop_string_may_begin_in_the_prefix(served: Served):
    greedy = SamplingParams(20, temperature=0.0)
    for first in count(4):
        request = RolloutRequest("begun", (first,), greedy, (0,))
        [whole] = served.generate([request])
        if len(whole.token_ids) > 8:
            break
    stop = (text_of(whole.token_ids[3:6].tolist()),)
    end = first_end(whole.token_ids.tolist(), stop)
    assert end is not None
    ending = replace(request, sampling=replace(greedy, stop=stop))
    drawn = tuple(whole.token_ids[:end].tolist())
    [found] = served.run(gather(served, [replace(ending, prefixes=(drawn[:-1],))]))
    assert (found.token_ids.tolist(), found.finish_reason) == ([drawn[-1]], "stop")
    with pytest.raises(RolloutError, match="the sample is finished"):
        served.generate([replace(ending, prefixes=(drawn,))])


def test_structured_output_is_kept_or_refused(served: Served):
    forms = (
        StructuredOutput(choice=("the", "other")),
        StructuredOutput(regex="(ab|cd)e{3}"),
        StructuredOutput(json_schema=json.dumps({"const": None})),
    )
    asked = [
        RolloutRequest(f"form={i}", (5, 6), SamplingParams(12, structured_output=form), (1, 2, 3))
        for i, form in enumerate(forms)
    ]
    if Capability.STRUCTURED_OUTPUT not in served.engine.capabilities:
        with pytest.raises(RolloutError, match="no structured output; engines that have it: "):
            served.generate(asked)
        return
    completions = served.generate(asked)
    texts = [text_of(c.token_ids.tolist()) for c in completions]
    assert set(texts[:3]) <= {"the", "other"}
    assert set(texts[3:6]) <= {"abeee", "cdeee"}
    assert set(texts[6:]) == {"null"}
    assert {c.finish_reason for c in completions} == {"stop"}
    with pytest.raises(RolloutError, match="cannot continue a prefix"):
        served.generate([replace(asked[0], prefixes=((4,), (4,), (4,)))])
    assert len(served.generate(requests())) == 12


def test_256_requests_at_a_time_with_a_shared_prefix(served: Served):
    asked = [
        RolloutRequest(f"many={i}", (*PREFIX, 4 + i % 28), SamplingParams(12), (1000 + i,))
        for i in range(NUM_CONCURRENT)
    ]
    found = served.generate(asked)
    assert largest_difference(model(True, 1), asked, found) <= MAX_LOGPROB_DIFFERENCE
    for place in (0, 100, 255):
        assert token_ids(served.generate([asked[place]])) == token_ids([found[place]])
    assert len(set(token_ids(found))) > 200
