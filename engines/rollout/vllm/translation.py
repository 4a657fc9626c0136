"""Translates requests, seeds and completions between this project and vLLM.

Promises: the requested distribution is sampled, or the request is refused; every token has a
logprob and a version. A sample that continues a prefix uses a new random stream, since vLLM's
cannot start in the middle; so it differs from an uninterrupted one.

Runs single samples through vLLM.

Promises: vLLM drops cancelled samples; a sample with stop strings ends at the first one.

Logprobs of given tokens, computed by vLLM with the served weights and without the prefix cache.

vLLM reports prompt logprobs only at temperature 1; for others `score_sequence` fetches and rescales
those of the whole vocabulary, which is slow. vLLM materializes the logits of all tokens of a step,
at most `max_prefill_tokens`.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch

from engines.errors import RolloutError
from engines.rollout.prompt_logprobs import Candidates, PromptRequest, PromptRows
from engines.rollout.served.sampler import RunningSample
from engines.rollout.stop_strings import SampledText
from engines.types import Completion, RolloutRequest, StructuredOutput

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a smaller positive temperature to this, treats the smallest as 0, and refuses one
above the maximum."""


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

    vLLM draws a whole vocabulary per token and cannot skip any, so behind `draw_offset` used
    numbers another stream starts.
    """
    if draw_offset:
        name = f"{seed & 2**64 - 1}/draw={draw_offset}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    seed &= 2**64 - 1
    return (seed ^ (seed >> 32)) & (2**32 - 1)


def sampling_params(sample: RunningSample, eos_token_ids: Sequence[int]) -> Any:
    """Return vLLM's parameters for one sample.

    Output comes once at the end; for a sample with stop strings also after each step.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request, sampling = sample.request, sample.request.sampling
    kind = RequestOutputKind.FINAL_ONLY if sample.text is None else RequestOutputKind.CUMULATIVE
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
        structured_outputs=_structured(sampling.structured_output),
        output_kind=kind,
    )


def _structured(form: StructuredOutput | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if form is None:
        return None
    return StructuredOutputsParams(
        json=form.json_schema, regex=form.regex, choice=list(form.choice) or None
    )


async def last(outputs: AsyncIterator[Any]) -> Any:
    """Return the last output of a vLLM request."""
    found: Any = None
    async for output in outputs:
        found = output
    return found


def completion(sample: RunningSample, output: Any, num_until_stop: int | None = None) -> Completion:
    """Convert vLLM's final output, up to the `num_until_stop` tokens that complete a stop string.

    Raises:
        RolloutError: a token lacks its logprob or version, or vLLM ended it for its own reasons.
    """
    token_ids = tuple(output.token_ids)
    rows = output.logprobs or ()
    versions: list[int] = []
    for span in output.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    if not len(token_ids) == len(rows) == len(versions):
        raise RolloutError(
            f"{sample.name}: {len(token_ids)} tokens with {len(rows)} logprobs and "
            f"{len(versions)} versions"
        )
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RolloutError(f"{sample.name}: vLLM ended it as {output.finish_reason}")
    logprobs = tuple(row[token].logprob for row, token in zip(rows, token_ids, strict=True))
    kept = slice(num_until_stop)
    reason = output.finish_reason if num_until_stop is None else "stop"
    return Completion(*sample.key, token_ids[kept], logprobs[kept], versions[kept], reason)


class VllmSampler:
    """See `Sampler`; `adapter` is vLLM's request for the adapter to sample with, or None.

    `llm` must have cached its supported tasks; else another coroutine could run between the start
    of a sample and the moment when vLLM knows it.
    """

    def __init__(self, llm: Any, eos_token_ids: frozenset[int]) -> None:
        self._llm: Any = llm
        self._eos_token_ids = sorted(eos_token_ids)
        self.adapter: Any = None

    @property
    def is_lost(self) -> bool:
        """See `Sampler`."""
        return self._llm is not None and self._llm.errored

    async def sample(self, sample: RunningSample) -> Completion:
        """See `Sampler`. vLLM drops a request whose task is cancelled."""
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(sample.token_ids)
        params = sampling_params(sample, self._eos_token_ids)
        outputs = self._llm.generate(prompt, params, sample.name, lora_request=self.adapter)
        if sample.text is not None:
            return await self._until_stop(sample, sample.text, outputs)
        return completion(sample, (await last(outputs)).outputs[0])

    def let_go(self) -> None:
        """Release vLLM, whose destructor fails at the end of the process."""
        self._llm = None

    async def _until_stop(
        self, sample: RunningSample, text: SampledText, outputs: AsyncIterator[Any]
    ) -> Completion:
        """Follow a sample step by step, and end it at a stop string; vLLM's own ignore a prefix."""
        found: Any = None
        num_seen, num_until_stop = 0, None
        async for found in outputs:
            fresh = found.outputs[0].token_ids[num_seen:]
            if num_until_stop is None and (number := text.contains_stop(fresh)) is not None:
                num_until_stop = num_seen + number
                if not found.finished:
                    await self._llm.abort(sample.name)
            num_seen += len(fresh)
        return completion(sample, found.outputs[0], num_until_stop)


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
