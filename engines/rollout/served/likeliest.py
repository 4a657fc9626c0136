"""Converts what a library returns about a prompt into the requested answer.

Promises: exactly K allowed tokens per position, the likeliest first, ties by lowest id; or None if
the library returned too few to decide.
Letters: N tokens that are asked about, K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest

Candidates = Sequence[tuple[float, int]]
"""(logprob, token) pairs of the likeliest tokens of one position, distinct and in any order."""


@dataclass(frozen=True)
class PromptRows:
    """Logprobs of the given tokens, and likeliest tokens per position; none if not requested."""

    logprobs: Sequence[float]
    likeliest: Sequence[Candidates] = ()


def prompt_answer(request: PromptRequest, rows: PromptRows) -> PromptLogprobs | None:
    """Return the answer to a request; None if a position has fewer than K allowed tokens.

    A RolloutError if the rows do not match the N tokens that are asked about.
    """
    num_asked = len(request.token_ids) - request.first
    if len(rows.logprobs) != num_asked or (request.num_top and len(rows.likeliest) != num_asked):
        raise RolloutError(
            f"{request.request_id}: asked about {num_asked} tokens, told of {len(rows.logprobs)}, "
            f"and what is likely in {len(rows.likeliest)} places"
        )
    logprobs_N = torch.tensor(rows.logprobs, dtype=torch.float32)
    if not request.num_top:
        return PromptLogprobs(request.request_id, logprobs_N)
    chosen = [_chosen(each, request) for each in rows.likeliest]
    if any(len(each) < request.num_top for each in chosen):
        return None
    return PromptLogprobs(request.request_id, logprobs_N, *_columns(chosen))


def _chosen(candidates: Candidates, request: PromptRequest) -> list[tuple[float, int]]:
    below = request.below
    taken = [each for each in candidates if below is None or each[1] < below]
    return sorted(taken, key=lambda each: (-each[0], each[1]))[: request.num_top]


def _columns(chosen: Sequence[Candidates]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[token for _, token in each] for each in chosen], dtype=torch.int64)
    logprobs = torch.tensor([[logprob for logprob, _ in each] for each in chosen])
    return ids, logprobs
