"""What a library says of a prompt, and the answer that is made of it; and how often it is asked."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.errors import RolloutError
from engines.rollout.base import Capability
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest, PromptRows, prompt_answer
from engines.rollout.served.engine import ServedEngine
from infra.errors import DeadlineError

REQUEST = PromptRequest("a", (5, 6, 7), 1, num_top=2)
ROWS = PromptRows([-1.5, -3.0], [[(-1.5, 6), (-0.5, 9)], [(-1.0, 8), (-1.0, 4), (-2.0, 3)]])


def test_the_likeliest_come_first_and_of_equals_the_lowest_token() -> None:
    found = prompt_answer(REQUEST, ROWS)
    assert found is not None
    assert found.request_id == "a"
    assert found.logprobs_N.tolist() == [-1.5, -3.0]
    assert found.topk_ids_NK is not None
    assert found.topk_ids_NK.tolist() == [[9, 6], [4, 8]]
    assert found.topk_logprobs_NK is not None
    assert found.topk_logprobs_NK.tolist() == [[-0.5, -1.5], [-1.0, -1.0]]
    assert (found.topk_ids_NK.dtype, found.topk_logprobs_NK.dtype) == (torch.int64, torch.float32)


def test_tokens_that_may_not_be_taken_leave_too_few() -> None:
    barred = PromptRequest("a", (5, 6, 7), 1, num_top=2, below=9)
    assert prompt_answer(barred, ROWS) is None
    more = PromptRows([-1.5, -3.0], [[*ROWS.likeliest[0], (-2.5, 2)], ROWS.likeliest[1]])
    found = prompt_answer(barred, more)
    assert found is not None
    assert found.topk_ids_NK is not None
    assert found.topk_ids_NK.tolist() == [[6, 2], [4, 8]]


def test_of_a_request_for_the_tokens_alone_there_is_nothing_else() -> None:
    found = prompt_answer(PromptRequest("a", (5, 6, 7), 2), PromptRows([-3.0]))
    assert found is not None
    assert found.logprobs_N.tolist() == [-3.0]
    assert found.topk_ids_NK is found.topk_logprobs_NK is None


@pytest.mark.parametrize("rows", [PromptRows([-1.5], ROWS.likeliest), PromptRows([-1.5, -3.0])])
def test_what_is_not_said_of_every_token_is_refused(rows: PromptRows) -> None:
    with pytest.raises(RolloutError, match="a: asked about 2 tokens, got"):
        prompt_answer(REQUEST, rows)


class Library(ServedEngine):
    """Just enough of an engine to be asked: of 12 tokens, the higher the likelier."""

    capabilities = frozenset({Capability.PROMPT_LOGPROBS})

    def __init__(self, delay_s: float = 0.0, timeout_s: float = 10.0) -> None:
        self.asked: list[tuple[str, int]] = []
        self.num_now = self.num_at_once = 0
        self._delay_s = delay_s
        layout: Any = SimpleNamespace(vocab_size=12)
        stops: Any = SimpleNamespace()
        super().__init__("it", layout, "float32", timeout_s, stops, 8, 2)
        self._version = 0

    @property
    def _is_lost(self) -> bool:
        return False

    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        self.asked.append((request.request_id, num_top))
        self.num_now += 1
        self.num_at_once = max(self.num_at_once, self.num_now)
        await asyncio.sleep(self._delay_s)
        self.num_now -= 1
        num_asked = len(request.token_ids) - request.first
        row = [(float(token - 12), token) for token in range(11, 11 - num_top, -1)]
        return PromptRows([-1.0] * num_asked, [row] * num_asked if num_top else ())


Library.__abstractmethods__ = frozenset()


def ids_of(answers: list[PromptLogprobs]) -> list[list[list[int]]]:
    return [each.topk_ids_NK.tolist() for each in answers if each.topk_ids_NK is not None]


def test_more_tokens_are_asked_for_only_if_barred_are_likely() -> None:
    library = Library()
    requests = [
        PromptRequest("any", (1, 2), num_top=3),
        PromptRequest("below", (1, 2), num_top=3, below=10),
        PromptRequest("beyond", (1, 2), num_top=3, below=40),
    ]
    found = asyncio.run(library.prompt_logprobs(requests))
    assert ids_of(found) == [[[11, 10, 9]], [[9, 8, 7]], [[11, 10, 9]]]
    assert sorted(library.asked) == [("any", 3), ("below", 3), ("below", 5), ("beyond", 3)]


def test_so_many_are_asked_at_once_and_answers_keep_their_order() -> None:
    library = Library(delay_s=0.01)
    requests = [PromptRequest(f"r{at}", (1, 2, 3), num_top=1) for at in range(7)]
    found = asyncio.run(library.prompt_logprobs(requests))
    assert [each.request_id for each in found] == [f"r{at}" for at in range(7)]
    assert library.num_at_once == 2


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (PromptRequest("a", (1,) * 8), "a sequence of 8 tokens; need 2 to 7"),
        (PromptRequest("a", (1, 12)), "outside the vocabulary"),
        (PromptRequest("a", (1, 2), temperature=0.7), "temperature is 0.7; .* supports only 1"),
    ],
)
def test_what_the_library_cannot_say_is_refused(request_: PromptRequest, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        asyncio.run(Library().prompt_logprobs([request_]))


def test_silent_library_times_out_and_cancels_other_requests() -> None:
    library = Library(delay_s=5.0, timeout_s=0.05)

    async def ask() -> None:
        with pytest.raises(DeadlineError, match="it to compute logprobs of a prompt"):
            await library.prompt_logprobs([PromptRequest(f"r{at}", (1, 2)) for at in range(4)])
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())
    assert library._num_scoring == 0
