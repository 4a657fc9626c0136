"""Samples that an engine's processes compute, and the `generate` calls that wait for them.

Promises: each sample has one task, which ends with its completion, with an error for its call, or
cancelled. A call ends by its deadline. A sample whose call has ended is cancelled.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.stop_strings import SampledText, StopStrings
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


@dataclass(eq=False)
class RunningSample:
    """One sample in the engine's processes.

    Attributes:
        place: index of its seed in the request.
        name: its name in the processes; unique, and not a prefix of another sample's name.
        call: number of its `generate` call.
        aborted: an abort was requested.
    """

    request: RolloutRequest
    place: int
    name: str
    call: int
    text: SampledText | None = None
    aborted: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def key(self) -> tuple[str, int]:
        """Request id and sample index."""
        return self.request.request_id, self.request.sample_index(self.place)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and prefix, which the processes take as its prompt."""
        return [*self.request.prompt_ids, *self.request.prefix(self.place)]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - len(self.request.prefix(self.place))

    def empty(self) -> Completion:
        """Return the completion of a sample aborted before its first token."""
        return Completion(*self.key, (), (), (), "abort")


class Sampler(Protocol):
    """Computes samples with the engine's library."""

    @property
    def is_lost(self) -> bool:
        """True if the processes are gone."""
        ...

    async def sample(self, sample: RunningSample) -> Completion:
        """Sample to the end; when cancelled, have the processes drop the sample.

        The processes must know the sample before this coroutine first yields, else it must check
        `RunningSample.aborted` once they do: an abort reaches only known samples.
        """
        ...


class InFlight:
    """All samples in flight of one engine; `timeout_s` is the deadline of one call."""

    def __init__(self, sampler: Sampler, stop_strings: StopStrings, timeout_s: float) -> None:
        self._sampler = sampler
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
        """Keys of the samples of every call that has not ended."""
        return set().union(*self._taken.values())

    def start(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Start checked requests; the completions come as they are finished."""
        call = next(self._numbers)
        samples = [
            RunningSample(
                request,
                place,
                f"{call}/{place}/{request.request_id}/",
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
        weakref.finalize(stream, self._forget, call)  # for a stream that is never iterated
        return stream

    def mark_aborted(self, request_ids: Sequence[str] | None) -> list[str]:
        """Keep samples of these requests (None: all) from starting; return the samples' names."""
        wanted = None if request_ids is None else set(request_ids)
        hit = [s for s in self._samples if wanted is None or s.request.request_id in wanted]
        for sample in hit:
            sample.aborted = True
        return [sample.name for sample in hit]

    async def close(self) -> None:
        """Wait until every sample has ended."""
        await _ended(self._samples, self._timeout_s)

    async def see_ended(self, timeout_s: float) -> int:
        """Wait for samples that were aborted or whose call ended; return how many still run."""
        ending = [s for s in self._samples if s.aborted or s.call not in self._calls]
        await _ended(ending, timeout_s)
        return len(self._samples.intersection(ending))

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
        if self._calls.pop(call, None) is None:
            return
        del self._taken[call]
        for sample in self._samples:
            if sample.call == call and sample.task is not None:
                sample.task.cancel()

    def _start(self, sample: RunningSample) -> None:
        self._samples.add(sample)
        sample.task = asyncio.get_running_loop().create_task(self._run(sample))

        def ended(task: "asyncio.Task[None]") -> None:
            self._samples.discard(sample)
            if not task.cancelled() and (error := task.exception()) is not None:
                kind = ReplicaLostError if self._sampler.is_lost else RolloutError
                failure = kind(f"sampling failed: {error}")
                failure.__cause__ = error
                self._deliver(sample, failure)

        sample.task.add_done_callback(ended)

    async def _run(self, sample: RunningSample) -> None:
        result = sample.empty() if sample.aborted else await self._sampler.sample(sample)
        self._samples.discard(sample)
        self._deliver(sample, result)

    def _deliver(self, sample: RunningSample, item: Completion | RolloutError) -> None:
        queue = self._calls.get(sample.call)
        if queue is not None:
            queue.put_nowait(item)


async def _ended(samples: Iterable[RunningSample], timeout_s: float) -> None:
    tasks = [sample.task for sample in samples if sample.task is not None]
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
