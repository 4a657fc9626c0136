"""Runs single samples through vLLM.

Promises: vLLM drops cancelled samples; a sample with stop strings ends at the first one.
"""

from collections.abc import AsyncIterator
from typing import Any

from engines.rollout.served.in_flight import RunningSample
from engines.rollout.stop_strings import SampledText
from engines.rollout.vllm.translation import completion, last, sampling_params
from engines.types import Completion


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
