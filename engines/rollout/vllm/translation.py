"""Translates requests, seeds and completions between this project and vLLM.

Promises: the requested distribution is sampled, or the request is refused; every token has a
logprob and a version. A sample that continues a prefix uses a new random stream, since vLLM's
cannot start in the middle; so it differs from an uninterrupted one.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engines.errors import RolloutError
from engines.rollout.served.in_flight import RunningSample
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
