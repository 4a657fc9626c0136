"""Has vLLM compute single samples, and logprobs of given tokens.

Promises: the requested distribution is sampled, or the request is refused. vLLM drops cancelled
samples. Logprobs of given tokens are computed with the served weights, without the prefix cache.
Does not promise that a sample that continues a prefix equals an uninterrupted one: vLLM's random
stream cannot start in the middle, so a new one is used. `score_sequence` at a temperature other
than 1 is slow, since vLLM reports only temperature 1: the logprobs of the whole vocabulary are
fetched and rescaled. vLLM materializes the logits of all tokens of a step: at most
`max_prefill_tokens`, or one context if prefills are not split.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import Candidates, PromptRequest, PromptRows, logprob_at
from engines.rollout.served.engine import RunningSample
from engines.types import Completion, RolloutRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a smaller positive temperature to the minimum, or treats it as 0 if it is tiny, and
refuses one above the maximum."""


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that vLLM would silently change or refuse itself."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE or temperature > MAX_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; vLLM samples at 0 and from "
            f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}; use one of these"
        )


def vllm_seed(seed: int, draw_offset: int = 0) -> int:
    """Return a 32-bit seed for vLLM; torch's CPU generator ignores all other bits.

    vLLM draws one number per vocabulary entry for each token and cannot skip any, so a sample with
    a `draw_offset` gets a stream of its own.
    """
    if draw_offset:
        name = f"{seed & 2**64 - 1}/draw={draw_offset}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    seed &= 2**64 - 1
    return (seed ^ (seed >> 32)) & (2**32 - 1)


def sampling_params(sample: RunningSample, eos_token_ids: Collection[int]) -> Any:
    """Return vLLM's parameters for one sample.

    Output comes once at the end; for a sample with stop strings also after each step.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    request, sampling = sample.request, sample.request.sampling
    form = sampling.structured_output
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=vllm_seed(request.seeds[sample.place], request.draw_offset(sample.place)),
        max_tokens=sample.num_left,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
        structured_outputs=form
        and StructuredOutputsParams(
            json=form.json_schema, regex=form.regex, choice=list(form.choice) or None
        ),
        output_kind=(
            RequestOutputKind.FINAL_ONLY if sample.text is None else RequestOutputKind.CUMULATIVE
        ),
    )


def completion(sample: RunningSample, output: Any) -> Completion:
    """Convert vLLM's final output.

    Raises:
        RolloutError: a token lacks its logprob or version, or vLLM ended the sample on its own.
    """
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RolloutError(f"{sample.name}: vLLM ended it as {output.finish_reason}")
    token_ids, rows = tuple(output.token_ids), output.logprobs or ()
    if len(rows) != len(token_ids):
        raise RolloutError(f"{sample.name}: got {len(rows)} logprobs of {len(token_ids)} tokens")
    return sample.completion(
        token_ids,
        [row[token].logprob for row, token in zip(rows, token_ids, strict=True)],
        [(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
        output.finish_reason,
    )


async def score_sequence(
    llm: Any, ids: Sequence[int], temperature: float, vllm_id: str, adapter: Any = None
) -> tuple[float, ...]:
    """Return the logprob of every token but the first; `vllm_id` names the request."""
    told = await _prompt_logprobs(llm, ids, 0 if temperature == 1 else -1, vllm_id, adapter)
    rows = zip(told[1:], ids[1:], strict=True)
    if temperature == 1:
        return tuple(row[token].logprob for row, token in rows)
    return tuple(
        logprob_at([row[other].logprob for other in range(len(row))], token, temperature)
        for row, token in rows
    )


async def prompt_rows(
    llm: Any, request: PromptRequest, num_top: int, vllm_id: str, adapter: Any = None
) -> PromptRows:
    """Return vLLM's logprobs of the requested tokens, and of the `num_top` likeliest of each."""
    ids = request.token_ids
    told = await _prompt_logprobs(llm, ids, num_top, vllm_id, adapter)
    rows = list(zip(told[request.first :], ids[request.first :], strict=True))
    return PromptRows(
        [row[token].logprob for row, token in rows],
        [_likeliest(row, token, num_top) for row, token in rows] if num_top else (),
    )


def _likeliest(row: Mapping[int, Any], token: int, num_top: int) -> Candidates:
    """Return candidates, without the given token where vLLM lists it in addition."""
    return [
        (each.logprob, other)
        for other, each in row.items()
        if other != token or len(row) <= num_top
    ]


async def _prompt_logprobs(
    llm: Any, ids: Sequence[int], num_told: int, vllm_id: str, adapter: Any
) -> Sequence[Any]:
    """Return per token a mapping from tokens to vLLM's `Logprob`; None for the first token.

    A mapping holds the given token and the `num_told` likeliest; -1 stands for all.
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
    told: Sequence[Any] = ()
    async for found in llm.generate(tokens_input(list(ids)), params, vllm_id, lora_request=adapter):
        told = found.prompt_logprobs
    return told
