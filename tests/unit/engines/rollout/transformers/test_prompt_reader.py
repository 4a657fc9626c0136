"""Logprobs of given tokens by the engine transformers: the numbers, their tiles, who waits."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.transformers.running_batch import read_prompts
from engines.training.backends.transformers import head

SEQUENCES = ((4, 9), (5, 6, 7, 8, 9, 10, 11), tuple(4 + (5 * i) % 20 for i in range(40)), (7, 7, 7))


def asked(**changes: Any) -> list[PromptRequest]:
    return [
        PromptRequest(f"s{at}", ids, 1 + at % 2 if len(ids) > 2 else 1, **changes)
        for at, ids in enumerate(SEQUENCES)
    ]


@torch.no_grad()
def expected(model: Any, request: PromptRequest) -> tuple[Tensor, Tensor, Tensor]:
    """By one plain forward pass over all logits."""
    ids = torch.tensor([request.token_ids])
    logits = model(input_ids=ids).logits[0, request.first - 1 : -1].float()
    logprobs = (logits / request.temperature).log_softmax(-1)
    top = logprobs[:, : request.below].topk(request.num_top, dim=1)
    own = logprobs.gather(1, ids[0, request.first :, None]).squeeze(1)
    return own, top.indices, top.values


def check(model: Any, requests: list[PromptRequest], found: list[PromptLogprobs]) -> None:
    assert [each.request_id for each in found] == [each.request_id for each in requests]
    for request, said in zip(requests, found, strict=True):
        own, ids, logprobs = expected(model, request)
        torch.testing.assert_close(said.logprobs_N, own, rtol=0, atol=1e-5)
        if not request.num_top:
            assert said.topk_ids_NK is said.topk_logprobs_NK is None
            continue
        torch.testing.assert_close(said.topk_logprobs_NK, logprobs, rtol=0, atol=1e-5)
        assert torch.equal(said.topk_ids_NK, ids)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("num_top", "below"), [(0, None), (5, None), (24, None), (5, 17)])
def test_they_are_those_of_a_plain_pass(
    lab, temperature: float, num_top: int, below: int | None
) -> None:
    # The long sequence is more than the budget, and alone.
    engine = lab.engine(options={"max_prefill_tokens": 24})
    requests = asked(temperature=temperature, num_top=num_top, below=below)
    check(lab.model, requests, asyncio.run(engine.prompt_logprobs(requests)))


def test_of_one_call_each_may_ask_something_else(lab) -> None:
    requests = [
        PromptRequest("a", (5, 6, 7, 8), 2, num_top=3),
        PromptRequest("b", (5, 6, 7, 8), 1, temperature=0.5),
        PromptRequest("c", (9, 8, 7), 1, num_top=3),
    ]
    check(lab.model, requests, asyncio.run(lab.engine().prompt_logprobs(requests)))


def test_new_weights_are_those_that_speak(lab) -> None:
    engine, other = lab.engine(), lab.other_weights(3)
    requests = asked(num_top=4)
    check(lab.model, requests, asyncio.run(engine.prompt_logprobs(requests)))
    lab.send(engine, other, 1)
    check(other, requests, asyncio.run(engine.prompt_logprobs(requests)))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.num_elements = max(self.num_elements, each.numel())
        return made


def test_logits_live_in_tiles(build_lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tokens they would be more than any other tensor of the pass."""
    lab = build_lab(vocab_size=500, tie_word_embeddings=False)
    engine = lab.engine()
    requests = [PromptRequest("a", tuple(range(4, 64)), num_top=4)]
    for elements, is_whole in ((1 << 24, True), (512, False)):
        monkeypatch.setattr(head, "tile_elements", lambda *_, n=elements, **__: n)
        with Largest() as largest:
            found = list(read_prompts(engine._model, requests, 8192))
        assert (largest.num_elements >= 59 * 500) == is_whole
        check(lab.model, requests, found[0])


def test_samples_in_flight_are_what_they_would_have_been(lab) -> None:
    requests = lab.requests(4, 2)

    async def both(engine: Any, reads: bool) -> list[tuple[int, ...]]:
        stream = engine.generate(requests)
        found = [await anext(stream)]
        if reads:
            check(lab.model, asked(num_top=3), await engine.prompt_logprobs(asked(num_top=3)))
        found += [completion async for completion in stream]
        return sorted((c.request_id, c.sample_index, c.token_ids.tolist()) for c in found)

    alone = asyncio.run(both(lab.engine(), reads=False))
    assert asyncio.run(both(lab.engine(), reads=True)) == alone


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (PromptRequest("a", (5,)), "a sequence of 1 tokens; need 2 to 64"),
        (PromptRequest("a", (5,) * 65), "a sequence of 65 tokens"),
        (PromptRequest("a", (5, 24)), "outside the vocabulary of 24"),
        (PromptRequest("a", (5, 6), 2), "first is 2; need 1 to 1"),
        (PromptRequest("a", (5, 6), 0), "first is 0"),
        (PromptRequest("a", (5, 6), temperature=0.0), "need a number above 0"),
        (PromptRequest("a", (5, 6), num_top=25), "num_top is 25; need 0 to 24"),
        (PromptRequest("a", (5, 6), num_top=4, below=3), "num_top is 4; need 0 to 3"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_name(
    lab, request_: PromptRequest, said: str
) -> None:
    with pytest.raises(RolloutError, match=f"^a: .*{said}"):
        asyncio.run(lab.engine().prompt_logprobs([request_]))


def test_without_confirmed_weights_nothing_is_said(lab) -> None:
    with pytest.raises(RolloutError, match="no confirmed weights"):
        asyncio.run(lab.bare_engine().prompt_logprobs(asked()))
    with pytest.raises(RolloutError, match="the same id"):
        asyncio.run(lab.engine().prompt_logprobs([asked()[0], asked()[0]]))


def test_an_architecture_that_reworks_its_logits_is_refused(build_lab) -> None:
    lab = build_lab("granite", logits_scaling=4.0)
    with pytest.raises(RolloutError, match="the architecture sets logits_scaling; choose"):
        asyncio.run(lab.engine().prompt_logprobs(asked()))
