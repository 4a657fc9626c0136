"""Logprobs of given tokens, computed by vLLM with the served weights and without the prefix cache.

vLLM reports prompt logprobs only at temperature 1; for others `score_sequence` fetches and rescales
those of the whole vocabulary, which is slow. vLLM materializes the logits of all tokens of a step,
at most `max_prefill_tokens`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engines.rollout.prompt_logprobs import PromptRequest
from engines.rollout.served.likeliest import Candidates, PromptRows
from engines.rollout.vllm.translation import last


async def score_sequence(
    llm: Any, ids: Sequence[int], temperature: float, vllm_id: str, adapter: Any = None
) -> tuple[float, ...]:
    """Return the logprob of every token but the first; `vllm_id` names the request."""
    num_told = 0 if temperature == 1 else -1
    told = await _prompt_logprobs(llm, ids, num_told, vllm_id, adapter)
    rows = zip(told[1:], ids[1:], strict=True)
    if temperature == 1:
        return tuple(row[token].logprob for row, token in rows)
    return tuple(_at_temperature(row, token, temperature) for row, token in rows)


async def prompt_rows(
    llm: Any, request: PromptRequest, num_top: int, vllm_id: str, adapter: Any = None
) -> PromptRows:
    """Return what vLLM reports for the tokens that a request asks about; see `score_sequence`."""
    ids = request.token_ids
    told = await _prompt_logprobs(llm, ids, num_top, vllm_id, adapter)
    rows = list(zip(told[request.first :], ids[request.first :], strict=True))
    logprobs = [row[token].logprob for row, token in rows]
    likeliest = [_likeliest(row, token, num_top) for row, token in rows] if num_top else ()
    return PromptRows(logprobs, likeliest)


def _likeliest(row: Mapping[int, Any], token: int, num_top: int) -> Candidates:
    """Return candidates, without the given token where vLLM lists it in addition."""
    is_more = len(row) > num_top
    return [(each.logprob, other) for other, each in row.items() if other != token or not is_more]


async def _prompt_logprobs(
    llm: Any, ids: Sequence[int], num_told: int, vllm_id: str, adapter: Any
) -> Sequence[Any]:
    """Return per token a mapping from tokens to vLLM's `Logprob`; None for the first token.

    It holds the given token and the `num_told` likeliest; -1 stands for all.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,  # the minimum
        prompt_logprobs=num_told,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs = llm.generate(tokens_input(list(ids)), params, vllm_id, lora_request=adapter)
    return (await last(outputs)).prompt_logprobs


def _at_temperature(row: dict[int, Any], token: int, temperature: float) -> float:
    logprobs = torch.tensor([row[other].logprob for other in range(len(row))], dtype=torch.float64)
    return float((logprobs / temperature).log_softmax(-1)[token])
