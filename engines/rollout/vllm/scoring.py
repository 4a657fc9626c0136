"""Logprobs of given tokens, by vLLM.

Promises: computed by the weights that are served, never from the prefix cache (vLLM skips it for
such a request).
Does not promise speed at a temperature other than 1: vLLM reports prompt logprobs at temperature
1, whatever it was asked for, so those of the whole vocabulary are fetched and scaled here.
"""

from collections.abc import Sequence
from typing import Any

import torch

from engines.rollout.vllm.translation import last


async def score_sequence(
    llm: Any, ids: Sequence[int], temperature: float, vllm_id: str, adapter: Any = None
) -> tuple[float, ...]:
    """Logprob of every token but the first.

    Args:
        llm: an `AsyncLLM`.
        ids: token ids, at least two.
        temperature: of the distribution, above 0.
        vllm_id: name of vLLM's request.
        adapter: vLLM's name of the one to compute with; None: with none.

    Returns:
        One logprob less than there are tokens.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,  # vLLM samples at least one
        prompt_logprobs=0 if temperature == 1 else -1,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    outputs = llm.generate(tokens_input(list(ids)), params, vllm_id, lora_request=adapter)
    final = await last(outputs)
    rows = zip(final.prompt_logprobs[1:], ids[1:], strict=True)
    if temperature == 1:
        return tuple(row[token].logprob for row, token in rows)
    return tuple(_at_temperature(row, token, temperature) for row, token in rows)


def _at_temperature(row: dict[int, Any], token: int, temperature: float) -> float:
    logprobs = torch.tensor([row[other].logprob for other in range(len(row))], dtype=torch.float64)
    return float((logprobs / temperature).log_softmax(-1)[token])
