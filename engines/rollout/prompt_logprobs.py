"""Requests for logprobs of given tokens, and their answers; used to query a served teacher.

Promises: an answer has exactly K allowed tokens per position, the likeliest first, ties by lowest
id; `prompt_answer` gives no answer if the library returned too few tokens to decide.
Letters: N tokens whose logprobs are requested, K likeliest tokens at each of their positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engines.errors import RolloutError

Candidates = Sequence[tuple[float, int]]
"""(logprob, token) pairs of the likeliest tokens of one position, distinct and in any order."""


@dataclass(frozen=True)
class PromptRequest:
    """A request for logprobs of the tokens of one sequence, which an engine reads as a prompt.

    Attributes:
        token_ids: at least two.
        first: index of the first token whose logprob is requested, 1 or more.
        temperature: above 0; see the capability PROMPT_LOGPROBS_AT_ANY_TEMPERATURE.
        num_top: K, the number of likeliest tokens per position; 0 for none.
        below: the K have ids below this; None: any id. Logprobs are over the whole vocabulary.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first: int = 1
    temperature: float = 1.0
    num_top: int = 0
    below: int | None = None

    num_samples: ClassVar[int] = 1
    """Load of the request for `engines.rollout.replica_pool`."""
    session: ClassVar[str | None] = None
    """None: any replica may answer."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Answer for the tokens from `PromptRequest.first` on; tensors are on the CPU.

    Attributes:
        logprobs_N: (N,) float32, of the given tokens.
        topk_ids_NK: (N, K) int64, distinct, the likeliest first; None where K is 0.
        topk_logprobs_NK: (N, K) float32, of `topk_ids_NK`; None where K is 0.
    """

    request_id: str
    logprobs_N: Tensor
    topk_ids_NK: Tensor | None = None
    topk_logprobs_NK: Tensor | None = None


def check_prompts(
    requests: Sequence[PromptRequest], max_length: int, vocab_size: int, *, any_temperature: bool
) -> None:
    """Refuse invalid requests with a RolloutError that names the request and the problem."""
    for request in requests:
        for problem in _problems(request, max_length, vocab_size, any_temperature):
            raise RolloutError(f"{request.request_id}: {problem}")
    if len({request.request_id for request in requests}) != len(requests):
        raise RolloutError("two requests of one call have the same id")


def _problems(
    request: PromptRequest, max_length: int, vocab_size: int, any_temperature: bool
) -> Iterator[str]:
    ids, length = request.token_ids, len(request.token_ids)
    if not 2 <= length <= max_length:
        yield f"a sequence of {length} tokens; need 2 to {max_length}"
    if not 1 <= request.first < length:
        yield f"first is {request.first}; need 1 to {length - 1}"
    if min(ids) < 0 or max(ids) >= vocab_size:
        yield f"a token is outside the vocabulary of {vocab_size}"
    if not 0 < request.temperature < float("inf"):
        yield f"temperature is {request.temperature}; need a number above 0"
    most = vocab_size if request.below is None else min(request.below, vocab_size)
    if not 0 <= request.num_top <= most:
        yield f"num_top is {request.num_top}; need 0 to {most}"
    if request.temperature != 1 and not any_temperature:
        yield f"temperature is {request.temperature}; this rollout engine supports only 1"


@dataclass(frozen=True)
class PromptRows:
    """Logprobs of the given tokens, and likeliest tokens per position (empty if not requested)."""

    logprobs: Sequence[float]
    likeliest: Sequence[Candidates] = ()


def prompt_answer(request: PromptRequest, rows: PromptRows) -> PromptLogprobs | None:
    """Return the answer to a request; None if `rows` have too few allowed tokens at a position.

    Raises RolloutError if the rows do not match the N requested tokens.
    """
    num_asked = len(request.token_ids) - request.first
    if len(rows.logprobs) != num_asked or (request.num_top and len(rows.likeliest) != num_asked):
        raise RolloutError(
            f"{request.request_id}: asked about {num_asked} tokens, got "
            f"{len(rows.logprobs)} logprobs and {len(rows.likeliest)} rows of likeliest tokens"
        )
    logprobs_N = torch.tensor(rows.logprobs, dtype=torch.float32)
    if not request.num_top:
        return PromptLogprobs(request.request_id, logprobs_N)
    chosen = [_chosen(each, request) for each in rows.likeliest]
    if any(len(each) < request.num_top for each in chosen):
        return None
    return PromptLogprobs(
        request.request_id,
        logprobs_N,
        torch.tensor([[token for _, token in each] for each in chosen], dtype=torch.int64),
        torch.tensor([[logprob for logprob, _ in each] for each in chosen]),
    )


def _chosen(candidates: Candidates, request: PromptRequest) -> list[tuple[float, int]]:
    allowed = [each for each in candidates if request.below is None or each[1] < request.below]
    return sorted(allowed, key=lambda each: (-each[0], each[1]))[: request.num_top]


def logprob_at(logprobs: Sequence[float], token: int, temperature: float) -> float:
    """Return a token's logprob at a temperature, from all tokens' logprobs at temperature 1."""
    whole = torch.tensor(logprobs, dtype=torch.float64)
    return float((whole / temperature).log_softmax(-1)[token])
