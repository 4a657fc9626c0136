"""Logprobs of given tokens, from what SGLang says of a prompt.

Does not promise to see what the cache holds: SGLang computes a prompt anew whose logprobs it is
asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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


def _scaled(row: Sequence[Sequence[Any]], token: int, temperature: float) -> float:
    """Row: (logprob, token, text) of each token of the vocabulary, in its order."""
    logprobs = torch.tensor([each[0] for each in row], dtype=torch.float64)
    return float((logprobs / temperature).log_softmax(-1)[token])
