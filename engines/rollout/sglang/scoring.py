"""Logprobs of given tokens, from what SGLang says of a prompt.

Does not promise to see what the cache holds: SGLang computes a prompt anew whose logprobs it is
asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.likeliest import PromptRows


def scores(answer: Mapping[str, Any], ids: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Logprob of every token but the first.

    Args:
        answer: to `translation.score_body`.
        ids: token ids, at least two.
        temperature: of the distribution, above 0.

    Returns:
        One logprob less than there are tokens.
    """
    meta = answer["meta_info"]
    if temperature == 1:
        return tuple(row[0] for row in meta["input_token_logprobs"][1:])
    rows = meta["input_token_ids_logprobs"][1:]
    return tuple(_scaled(row, token, temperature) for row, token in zip(rows, ids[1:], strict=True))


def prompt_rows(answer: Mapping[str, Any], request: PromptRequest, num_top: int) -> PromptRows:
    """What SGLang says of the tokens that a request asks about.

    Args:
        answer: to `translation.prompt_body`; of each place (logprob, token, text), and of the first
            nothing, for SGLang does not look before it.
        request: at temperature 1.
        num_top: likeliest tokens of each place that were asked for; 0: none.

    Returns:
        Of these tokens.
    """
    meta, num_asked = answer["meta_info"], len(request.token_ids) - request.first
    told = meta["input_token_logprobs"][-num_asked:]
    if not num_top:
        return PromptRows([row[0] for row in told])
    tops = meta["input_top_logprobs"][-num_asked:]
    likeliest = [[(each[0], each[1]) for each in row] for row in tops]
    return PromptRows([row[0] for row in told], likeliest)


def _scaled(row: Sequence[Sequence[Any]], token: int, temperature: float) -> float:
    """Row: (logprob, token, text) of each token of the vocabulary, in its order."""
    logprobs = torch.tensor([each[0] for each in row], dtype=torch.float64)
    return float((logprobs / temperature).log_softmax(-1)[token])
