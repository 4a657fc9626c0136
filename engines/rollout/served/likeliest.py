"""From what a library says of a prompt to the answer that was asked for.

Promises: exactly K tokens of each place, those that may be taken, the likeliest first and of equals
the lowest id; or nothing, where the library was asked for too few to know.
Letters: N tokens that are asked about, K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest

Candidates = Sequence[tuple[float, int]]
"""Logprob and token, distinct tokens in any order: the likeliest of one place."""


@dataclass(frozen=True)
class PromptRows:
    """What a library says of one sequence, place by place.

    Attributes:
        logprobs: of the tokens that stand there.
        likeliest: as many of each place as the library was asked for; empty where none were.
    """

    logprobs: Sequence[float]
    likeliest: Sequence[Candidates] = ()


def prompt_answer(request: PromptRequest, rows: PromptRows) -> PromptLogprobs | None:
    """The answer to a request.

    Args:
        request: with N tokens that are asked about.
        rows: of these N.

    Returns:
        The answer; None where fewer than K tokens of a place may be taken.

    Raises:
        RolloutError: the rows are not those of N tokens.
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
    """(N, K) int64 ids and float32 logprobs."""
    ids = torch.tensor([[token for _, token in each] for each in chosen], dtype=torch.int64)
    logprobs = torch.tensor([[logprob for logprob, _ in each] for each in chosen])
    return ids, logprobs
