"""The samples that vLLM works on, and the calls that wait for them.

Promises: one task per sample, which ends with its completion, with an error that its call gets,
or cancelled; a call ends by its deadline; what nobody waits for any more vLLM is told to drop.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.stop_strings import SampledText, StopStrings
from engines.rollout.vllm.translation import RunningSample, completion, last, sampling_params
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


class InFlight:
    """See the module.

    Args:
        llm: an `AsyncLLM` that was asked for its supported tasks before; else another coroutine
            could run between the start of a sample and the moment that vLLM knows of it.
        eos_token_ids: what ends a sample.
        stop_strings: of the served model.
        timeout_s: deadline of one call.
    """

    def __init__(
        self,
        llm: Any,
        eos_token_ids: frozenset[int],
        stop_strings: StopStrings,
        timeout_s: float,
    ) -> None:
        self._llm: Any = llm
        self._eos_token_ids = sorted(eos_token_ids)
        self._stop_strings = stop_strings
        self._timeout_s = timeout_s
        self._samples: set[RunningSample] = set()
        self._calls: dict[int, asyncio.Queue[Completion | RolloutError]] = {}
        self._taken: dict[int, set[tuple[str, int]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def sample_keys(self) -> set[tuple[str, int]]:
        """Of the samples of every call that has not ended."""
        return set().union(*self._taken.values())

    def start(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Put checked requests in line; the completions come as they are finished."""
        call = next(self._numbers)
        samples = [
            RunningSample(
                request,
                place,
                f"{call}/{place}/{request.request_id}",
                call,
                self._stop_strings.follow(request, place),
            )
            for request in requests
            for place in range(request.num_samples)
        ]
        self._calls[call] = asyncio.Queue()
        self._taken[call] = {sample.key for sample in samples}
        for sample in samples:
            self._start(sample)
        stream = self._stream(call, requests)
        weakref.finalize(stream, self._forget, call)  # one that nobody begins to wait for
        return stream

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
            self._forget(call)

    def _forget(self, call: int) -> None:
        """Give a call up; harmless when repeated."""
        if self._calls.pop(call, None) is None:
            return
        del self._taken[call]
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
            prompt = tokens_input(sample.token_ids)
            params = sampling_params(sample, self._eos_token_ids)
            outputs = self._llm.generate(prompt, params, sample.vllm_id)
            if sample.text is None:
                result = completion(sample, (await last(outputs)).outputs[0])
            else:
                result = await self._until_stop(sample, sample.text, outputs)
        self._samples.discard(sample)
        self._deliver(sample, result)

    async def _until_stop(
        self, sample: RunningSample, text: SampledText, outputs: AsyncIterator[Any]
    ) -> Completion:
        """Follow a sample step by step, and end it where a stop string does.

        vLLM's own stop strings know nothing of a prefix, and begin every text anew.
        """
        found: Any = None
        num_seen, num_until_stop = 0, None
        async for found in outputs:
            fresh = found.outputs[0].token_ids[num_seen:]
            if num_until_stop is None and (number := text.contains_stop(fresh)) is not None:
                num_until_stop = num_seen + number
                if not found.finished:
                    await self._llm.abort(sample.vllm_id)
            num_seen += len(fresh)
        return completion(sample, found.outputs[0], num_until_stop)

    def _deliver(self, sample: RunningSample, item: Completion | RolloutError) -> None:
        queue = self._calls.get(sample.call)
        if queue is not None:
            queue.put_nowait(item)
