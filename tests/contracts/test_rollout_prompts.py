"""The contract of a rollout engine about logprobs of given tokens, which a served teacher is asked.

For the engine that `--engine` names, as in test_rollout_engine; one whose row lacks the capability
refuses them. Covered: parity with a plain forward pass of the tokens that stand there and of the
likeliest, tied and untied heads, after every update, of prefixes that were cached; tokens that may
not be taken; sequences up to the end of the context; many at a time; beside samples in flight; what
is refused. Not covered: memory, speed.
"""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from rlhf.testing.rollout_models import CONTEXT_LENGTH, PREFIX, changed, model
from rlhf.testing.served_engine import TIMEOUT_S, Served, requests
from rlhf.testing.test_rollout_engine import (
    MAX_LOGPROB_DIFFERENCE,
    WRONG_BY,
    engine_name,
    token_ids,
)

from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError
from engines.rollout.base import Capability
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest

__all__ = ["engine_name"]  # pytest finds the fixture by its name in this module

VOCAB_SIZE = 32
SEQUENCES = ((5, 6), (6, 7, 8, 9, 10, 11, 12), PREFIX, (*PREFIX, 13, 14, 15), (*PREFIX, 4, 31, 4))


def says_them(engine_name: str) -> bool:
    return Capability.PROMPT_LOGPROBS.value in ROLLOUT_ENGINES.place(engine_name).capabilities


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(
    request: pytest.FixtureRequest, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if not says_them(engine_name):
        pytest.skip(f"needs the capability prompt_logprobs, which {engine_name} has not")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        directory = tmp_path_factory.mktemp("prompts")
        made = Served(engine_name, request.param == "tied", directory, TIMEOUT_S)
    yield made
    made.close()


def asked(
    sequences: Sequence[tuple[int, ...]] = SEQUENCES, temperature: float = 1.0, num_top: int = 5,
    below: int | None = None,
) -> list[PromptRequest]:  # fmt: skip
    """Of every other sequence only the second half."""
    return [
        PromptRequest(f"s{at}", ids, len(ids) // 2 if at % 2 else 1, temperature, num_top, below)
        for at, ids in enumerate(sequences)
    ]


@torch.no_grad()
def apart(made, requests: Sequence[PromptRequest], found: Sequence[PromptLogprobs]) -> float:
    """Largest difference to a plain forward pass; infinite where other tokens are the likeliest."""
    worst = 0.0
    assert [each.request_id for each in found] == [each.request_id for each in requests]
    for request, said in zip(requests, found, strict=True):
        ids = torch.tensor([request.token_ids])
        logits = made(input_ids=ids).logits[0, request.first - 1 : -1].float()
        plain = (logits / request.temperature).log_softmax(-1)
        own = plain.gather(1, ids[0, request.first :, None]).squeeze(1)
        assert said.logprobs_N.shape == own.shape
        worst = max(worst, float((said.logprobs_N - own).abs().max()))
        if not request.num_top:
            assert said.topk_ids_NK is said.topk_logprobs_NK is None
            continue
        top_ids, top_logprobs = said.topk_ids_NK, said.topk_logprobs_NK
        assert top_ids is not None
        assert top_logprobs is not None
        assert (top_ids.dtype, top_logprobs.dtype) == (torch.int64, torch.float32)
        best = plain[:, : request.below].topk(request.num_top, dim=1).values
        assert top_ids.shape == top_logprobs.shape == best.shape
        assert all(len(set(row)) == request.num_top for row in top_ids.tolist())
        assert (top_ids < (request.below or VOCAB_SIZE)).all()
        assert (top_logprobs.diff(dim=1) <= 0).all()
        # Of each token its own, and all together the largest: ties may fall either way.
        of_these = plain.gather(1, top_ids)
        worst = max(worst, float((top_logprobs - of_these).abs().max()))
        worst = max(worst, float((top_logprobs - best).abs().max()))
    return worst


def say(served: Served, requests: list[PromptRequest]) -> list[PromptLogprobs]:
    return served.run(served.engine.prompt_logprobs(requests))


def test_an_engine_without_the_capability_refuses(engine_name, tmp_path_factory) -> None:
    if says_them(engine_name):
        pytest.skip(f"needs an engine without prompt_logprobs; {engine_name} has it")
    made = Served(engine_name, True, tmp_path_factory.mktemp("plain"), TIMEOUT_S)
    try:
        made.send(model(True, 1), 0)
        with pytest.raises(RolloutError):
            say(made, asked())
    finally:
        made.close()


def test_nothing_is_said_without_confirmed_weights(served: Served) -> None:
    served.run(served.engine.sleep())
    served.run(served.engine.wake_up())
    with pytest.raises(RolloutError):
        say(served, asked())


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE])
def test_they_are_those_of_a_plain_pass(served: Served, num_top: int) -> None:
    made = model(served.tied, 2)
    served.send(made, 0)
    assert apart(made, asked(num_top=num_top), say(served, asked(num_top=num_top))) <= (
        MAX_LOGPROB_DIFFERENCE
    )


def test_another_temperature_is_known_or_refused(served: Served) -> None:
    made = model(served.tied, 2)
    served.send(made, 0)
    warm = asked(temperature=0.7)
    if Capability.PROMPT_LOGPROBS_AT_ANY_TEMPERATURE in served.engine.capabilities:
        assert apart(made, warm, say(served, warm)) <= MAX_LOGPROB_DIFFERENCE
        return
    with pytest.raises(RolloutError, match="temperature is 0.7"):
        say(served, warm)


def test_barred_tokens_count_in_normalization_but_not_in_top_k(served: Served) -> None:
    made = model(served.tied, 2)
    served.send(made, 0)
    barred = asked(num_top=4, below=9)
    assert apart(made, barred, say(served, barred)) <= MAX_LOGPROB_DIFFERENCE
    # Some of them are likely, or this would prove nothing.
    free = say(served, asked(num_top=4))
    assert any(bool((each.topk_ids_NK >= 9).any()) for each in free)


def test_each_update_speaks_also_of_prefixes_that_were_cached(served: Served) -> None:
    made = model(served.tied, 3)
    served.send(made, 0)
    assert apart(made, asked(), say(served, asked())) <= MAX_LOGPROB_DIFFERENCE
    served.generate(requests())
    assert apart(made, asked(), say(served, asked())) <= MAX_LOGPROB_DIFFERENCE
    before = say(served, asked())
    for version, group in enumerate(("projections", "embedding"), 1):
        served.send(changed(made, group, version), version)
        assert apart(made, asked(), say(served, asked())) <= MAX_LOGPROB_DIFFERENCE
    assert apart(made, asked(num_top=0), [
        PromptLogprobs(each.request_id, each.logprobs_N) for each in before
    ]) > WRONG_BY  # fmt: skip


def test_a_sequence_may_go_to_the_end_of_the_context(served: Served) -> None:
    made = model(served.tied, 2)
    served.send(made, 0)
    longest = CONTEXT_LENGTH - ROLLOUT_ENGINES.place(served.name).num_spare_tokens
    ids = tuple(4 + (5 * at) % 28 for at in range(CONTEXT_LENGTH + 1))
    whole = [PromptRequest("whole", ids[:longest], longest - 3, num_top=3)]
    assert apart(made, whole, say(served, whole)) <= MAX_LOGPROB_DIFFERENCE
    with pytest.raises(RolloutError, match="beyond"):
        say(served, [PromptRequest("beyond", ids[: longest + 1], 1)])


def test_many_are_answered_at_a_time(served: Served) -> None:
    made = model(served.tied, 2)
    served.send(made, 0)
    sequences = [(*PREFIX[: 5 + at % 60], 4 + at % 28) for at in range(96)]
    found = say(served, asked(sequences, num_top=3))
    assert apart(made, asked(sequences, num_top=3), found) <= MAX_LOGPROB_DIFFERENCE


def test_samples_in_flight_do_not_notice(served: Served) -> None:
    made = model(served.tied, 1)
    served.send(made, 0)
    expected = token_ids(served.generate(requests(40)))

    async def both():
        sampling = asyncio.create_task(served.collect(requests(40)))
        await asyncio.sleep(0)
        found = await served.engine.prompt_logprobs(asked())
        return await sampling, found

    completions, found = served.run(both())
    assert token_ids(completions) == expected
    assert apart(made, asked(), found) <= MAX_LOGPROB_DIFFERENCE


@pytest.mark.parametrize(
    "refused",
    [
        PromptRequest("short", (5,)),
        PromptRequest("first", (5, 6), 0),
        PromptRequest("last", (5, 6), 2),
        PromptRequest("unknown", (5, VOCAB_SIZE)),
        PromptRequest("greedy", (5, 6), temperature=0.0),
        PromptRequest("many", (5, 6), num_top=VOCAB_SIZE + 1),
        PromptRequest("few", (5, 6), num_top=4, below=3),
    ],
    ids=lambda each: each.request_id,
)
def test_what_cannot_be_answered_is_refused(served: Served, refused: PromptRequest) -> None:
    served.send(model(served.tied, 1), 0)
    with pytest.raises(RolloutError, match=refused.request_id):
        say(served, [*asked(), refused])
    assert len(say(served, asked())) == len(SEQUENCES)
