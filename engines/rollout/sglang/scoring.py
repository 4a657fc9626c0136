"""Reads logprobs of given tokens from SGLang's answers; SGLang computes them without its cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.likeliest import PromptRows


def scores(answer: Mapping[str, Any], ids: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Return the logprob of every token but the first, from the answer to `score_body`."""
    meta = answer["meta_info"]
    if temperature == 1:
        return tuple(row[0] for row in meta["input_token_logprobs"][1:])
    rows = meta["input_token_ids_logprobs"][1:]
    return tuple(_scaled(row, token, temperature) for row, token in zip(rows, ids[1:], strict=True))


def prompt_rows(answer: Mapping[str, Any], request: PromptRequest, num_top: int) -> PromptRows:
    """Return what the answer to `prompt_body` reports for the tokens that a request asks about.

    SGLang's rows are (logprob, token, text), with no logprob for the first token.
    """
    meta, num_asked = answer["meta_info"], len(request.token_ids) - request.first
    told = meta["input_token_logprobs"][-num_asked:]
    if not num_top:
        return PromptRows([row[0] for row in told])
    tops = meta["input_top_logprobs"][-num_asked:]
    likeliest = [[(each[0], each[1]) for each in row] for row in tops]
    return PromptRows([row[0] for row in told], likeliest)


def _scaled(row: Sequence[Sequence[Any]], token: int, temperature: float) -> float:
    """Return a token's logprob, given (logprob, token, text) of the whole vocabulary in order."""
    logprobs = torch.tensor([each[0] for each in row], dtype=torch.float64)
    return float((logprobs / temperature).log_softmax(-1)[token])
