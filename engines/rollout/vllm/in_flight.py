"""The samples that vLLM works on, and the calls that wait for them.

Promises: one task per sample, which ends with its completion, with an error that its call gets,
or cancelled; a call ends by its deadline; what nobody waits for any more vLLM is told to drop.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.vllm.translation import RunningSample, completion, last, sampling_params
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


class InFlight:
    """See the module.

    Args:
        llm: an `AsyncLLM` that was asked for its supported tasks before; else another coroutine
            could run between the start of a sample and the moment that vLLM knows of it.
        eos_token_ids: what ends a sample.
        timeout_s: deadline of one call.
    """

    def __init__(self, llm: Any, eos_token_ids: frozenset[int], timeout_s: float) -> None:
        self._llm: Any = llm
        self._eos_token_ids = sorted(eos_token_ids)
        self._timeout_s = timeout_s
        self._samples: set[RunningSample] = set()
        self._calls: dict[int, asyncio.Queue[Completion | RolloutError]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def request_ids(self) -> set[str]:
        """Of the requests that have an unfinished sample."""
        return {sample.request.request_id for sample in self._samples}

    def start(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Put checked requests in line; the completions come as they are finished."""
        call = next(self._numbers)
        self._calls[call] = asyncio.Queue()
        for request in requests:
            for index in range(request.num_samples):
                vllm_id = f"{call}/{index}/{request.request_id}"
                self._start(RunningSample(request, index, vllm_id, call))
        return self._stream(call, requests)

    def mark_aborted(self, request_ids: Sequence[str] | None) -> list[str]:
        """Let no sample of these requests (None: of any) start.

        Args:
            request_ids: names of requests.

        Returns:
            What vLLM calls those samples, for it to abort those that it knows of.
        """
        wanted = None if request_ids is None else set(request_ids)
        hit = [s for s in self._samples if wanted is None or s.request.request_id in wanted]
        for sample in hit:
            sample.aborted = True
        return [sample.vllm_id for sample in hit]

    async def close(self) -> None:
        """Wait until every sample has ended, one way or another, and let go of vLLM."""
        tasks = [sample.task for sample in self._samples if sample.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout_s)
        self._llm = None

    async def _stream(
        self, call: int, requests: Sequence[RolloutRequest]
    ) -> AsyncIterator[Completion]:
        queue = self._calls[call]
        num_open = sum(request.num_samples for request in requests)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            while num_open:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await queue.get()
                except TimeoutError:
                    what = f"{num_open} samples of {len(requests)} requests"
                    raise DeadlineError(what, self._timeout_s) from None
                if isinstance(item, RolloutError):
                    raise item
                num_open -= 1
                yield item
        finally:
            del self._calls[call]
            for sample in self._samples:
                if sample.call == call and sample.task is not None:
                    sample.task.cancel()  # vLLM drops a request whose task is cancelled

    def _start(self, sample: RunningSample) -> None:
        self._samples.add(sample)
        sample.task = asyncio.get_running_loop().create_task(self._run(sample))

        def ended(task: "asyncio.Task[None]") -> None:
            self._samples.discard(sample)
            if not task.cancelled() and (error := task.exception()) is not None:
                is_dead = self._llm is not None and self._llm.errored
                kind = ReplicaLostError if is_dead else RolloutError
                failure = kind(f"sampling failed: {error}")
                failure.__cause__ = error
                self._deliver(sample, failure)

        sample.task.add_done_callback(ended)

    async def _run(self, sample: RunningSample) -> None:
        from vllm.inputs.engine import tokens_input

        if sample.aborted:
            result = sample.empty()
        else:
            prompt = tokens_input(list(sample.request.prompt_ids))
            params = sampling_params(sample, self._eos_token_ids)
            final = await last(self._llm.generate(prompt, params, sample.vllm_id))
            result = completion(sample, final.outputs[0])
        self._samples.discard(sample)
        self._deliver(sample, result)

    def _deliver(self, sample: RunningSample, item: Completion | RolloutError) -> None:
        queue = self._calls.get(sample.call)
        if queue is not None:
            queue.put_nowait(item)
