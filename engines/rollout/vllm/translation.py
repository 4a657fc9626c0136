"""Between this project's requests and vLLM's: seeds, sampling parameters, completions.

Promises: the distribution that is sampled is the one that was asked for, or the request is
refused; logprobs and policy versions come out one per token.
Does not promise the same tokens for a seed as another engine: vLLM has random streams of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from engines.errors import RolloutError
from engines.types import Completion, RolloutRequest

MIN_TEMPERATURE = 0.01
"""vLLM raises a smaller positive temperature to this, and takes the smallest for 0."""


@dataclass(eq=False)
class RunningSample:
    """One sample on its way through vLLM.

    Attributes:
        request: that it belongs to.
        index: into the request's seeds.
        vllm_id: name of vLLM's request; unique among those in flight.
        call: of `generate`.
        aborted: it was aborted before vLLM knew of it.
        task: that waits for it.
    """

    request: RolloutRequest
    index: int
    vllm_id: str
    call: int
    aborted: bool = False
    task: "asyncio.Task[None] | None" = None

    def empty(self) -> Completion:
        """What it is when it ends before its first token."""
        return Completion(self.request.request_id, self.index, (), (), (), "abort")


def check_temperature(request: RolloutRequest) -> None:
    """Refuse a temperature that vLLM would change in silence."""
    temperature = request.sampling.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RolloutError(
            f"{request.request_id}: temperature is {temperature}; vLLM samples at 0 or from "
            f"{MIN_TEMPERATURE} on; use one of these"
        )


def vllm_seed(seed: int) -> int:
    """A seed of any size as one of 32 bits; torch's generator on a CPU ignores all others."""
    seed &= 2**64 - 1
    return (seed ^ (seed >> 32)) & (2**32 - 1)


def sampling_params(sample: RunningSample, eos_token_ids: Sequence[int]) -> Any:
    """Parameters for vLLM of one sample: one completion, whole, as token ids."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = sample.request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=vllm_seed(sample.request.seeds[sample.index]),
        max_tokens=sampling.max_new_tokens,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=list(eos_token_ids),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def last(outputs: AsyncIterator[Any]) -> Any:
    """The final output of one vLLM request, the only one of its kind that we ask for."""
    found: Any = None
    async for output in outputs:
        found = output
    return found


def completion(sample: RunningSample, output: Any) -> Completion:
    """What vLLM's final output of a sample says.

    Args:
        sample: the sample.
        output: a finished `CompletionOutput`.

    Returns:
        The completion.

    Raises:
        RolloutError: a token lacks its logprob or its version, or vLLM ended it for a reason of
            its own.
    """
    token_ids = tuple(output.token_ids)
    rows = output.logprobs or ()
    versions: list[int] = []
    for span in output.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    if not len(token_ids) == len(rows) == len(versions):
        raise RolloutError(
            f"{sample.vllm_id}: {len(token_ids)} tokens with {len(rows)} logprobs and "
            f"{len(versions)} versions"
        )
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RolloutError(f"{sample.vllm_id}: vLLM ended it as {output.finish_reason}")
    logprobs = tuple(row[token].logprob for row, token in zip(rows, token_ids, strict=True))
    return Completion(
        sample.request.request_id,
        sample.index,
        token_ids,
        logprobs,
        tuple(versions),
        output.finish_reason,
    )
