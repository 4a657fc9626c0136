"""Base class of rollout engines whose library samples in processes of its own.

Promises: the contract of `engines.rollout.base`, provided the abstract methods do what they say.
Library calls but `_sample` and `_end` have the deadline `rollout.timeout_s`; errors name the wait.
A sample has one task, which ends with its completion or error, or is cancelled when its call has
ended. A completion has one logprob and one version per token. A sample ends at its first stop
string; we search for it, since the libraries' own search ignores a prefix.
Does not promise to score, or to return prompt logprobs, while paused: the library may compute
nothing then.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engines.errors import ReplicaLostError, RolloutError, WeightSyncError
from engines.rollout.base import ALL_MEMORY, Capability, Health, MemoryTag, SleepLevel
from engines.rollout.engine_state import NO_VERSION, SampleOfCall, StatefulEngine
from engines.rollout.prompt_logprobs import (
    PromptLogprobs,
    PromptRequest,
    PromptRows,
    check_prompts,
    prompt_answer,
)
from engines.rollout.request_check import check_requests
from engines.rollout.served.weight_receiver import ModelLayout, agreed, order_of
from engines.rollout.stop_strings import SampledText, StopStrings
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from infra.errors import DeadlineError

T = TypeVar("T")
END_DEADLINE_S = 30.0
"""Time for aborted or abandoned samples to end."""


@dataclass(eq=False, slots=True)
class RunningSample(SampleOfCall):
    """One sample in the engine's processes.

    Attributes:
        name: its name in the processes; unique, and not a prefix of another sample's name.
        aborted: an abort was requested.
        num_until_stop: number of sampled tokens up to the first stop string; None: not found yet.
    """

    name: str
    text: SampledText | None = None
    aborted: bool = False
    num_until_stop: int | None = None
    _num_seen: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and prefix: the prompt of the request to the library."""
        return [*self.request.prompt_ids, *self.request.prefix(self.place)]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - len(self.request.prefix(self.place))

    def empty(self) -> Completion:
        """Return the completion of a sample aborted before its first token."""
        return Completion(*self.key, (), (), (), "abort")

    def reaches_stop(self, token_ids: Sequence[int]) -> bool:
        """Return True once: when `token_ids`, all sampled so far, first contain a stop string."""
        if self.text is None or self.num_until_stop is not None:
            return False
        number = self.text.contains_stop(token_ids[self._num_seen :])
        if number is not None:
            self.num_until_stop = self._num_seen + number
        self._num_seen = len(token_ids)
        return number is not None

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Iterable[tuple[int, int, int]],
        finish_reason: str,
    ) -> Completion:
        """Return the completion, cut after the token that completes a stop string.

        Args:
            spans: (version, start, end): tokens start .. end - 1 have this policy version.

        Raises:
            RolloutError: a token lacks its logprob or its version.
        """
        versions = [version for version, start, end in spans for _ in range(start, end)]
        if not len(token_ids) == len(logprobs) == len(versions):
            raise RolloutError(
                f"{self.name}: {len(token_ids)} tokens with {len(logprobs)} logprobs and "
                f"{len(versions)} versions"
            )
        kept = slice(self.num_until_stop)
        reason = finish_reason if self.num_until_stop is None else "stop"
        return Completion(*self.key, token_ids[kept], logprobs[kept], versions[kept], reason)


class ServedEngine(StatefulEngine):
    """Library-independent part of an engine; subclasses implement the calls to the library.

    `max_num_prompts` limits the prompts of a call whose logprobs are computed at a time.
    """

    _deaths: tuple[type[Exception], ...] = ()
    """Errors that the library's calls raise once its processes have died."""

    def __init__(
        self,
        library: str,
        layout: ModelLayout,
        dtype: str,
        timeout_s: float,
        stop_strings: StopStrings,
        context_length: int,
        max_num_prompts: int,
    ) -> None:
        super().__init__(timeout_s)
        self._library, self._layout, self._dtype = library, layout, dtype
        self._stop_strings, self._context_length = stop_strings, context_length
        self._max_num_prompts = max_num_prompts
        self._in_flight: dict[RunningSample, asyncio.Task[None]] = {}
        self._num_scoring = 0
        self._holds_weights = False

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class. Requests are checked and queued at the call, before iteration."""
        self._check_can_serve()
        check_requests(
            requests,
            self._keys_in_flight(),
            self._context_length,
            self._layout.vocab_size,
            structured_output=Capability.STRUCTURED_OUTPUT in self.capabilities,
        )
        for request in requests:
            self._check_request(request)
        call = next(self._call_numbers)
        samples = [
            RunningSample(
                request,
                place,
                call,
                f"{call}/{number}/{place}/{request.request_id}",
                self._stop_strings.follow(request, place) if request.sampling.stop else None,
            )
            for number, request in enumerate(requests)
            for place in range(request.num_samples)
        ]
        stream = self._open_call(call, requests)
        for sample in samples:
            task = asyncio.get_running_loop().create_task(self._compute(sample))
            self._in_flight[sample] = task
            task.add_done_callback(partial(self._ended, sample))
        return stream

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Samples in flight need `pause` first; they continue after it."""
        await self._prepare_update(version)
        order = order_of(source, self._layout, self._dtype)
        self._version, self._pending, self._holds_weights = NO_VERSION, None, False
        receipt = agreed(await self._wait(self._load(order), "to load weights"))
        self._pending, self._holds_weights = (version, receipt.digest), True
        return receipt

    async def update_adapter(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Pause samples in flight first; they continue with the new adapter."""
        await self._prepare_update(version)
        if not self._holds_weights:
            raise WeightSyncError("the rollout engine has no weights; an adapter needs a base")
        self._version, self._pending = NO_VERSION, None
        receipt = await self._wait(self._load_adapter(source), "to load an adapter")
        self._pending = (version, receipt.digest)
        return receipt

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """See the base class. Refused while paused, and for a sequence that fills the context."""
        self._check_can_score()
        for ids in sequences:
            if not 2 <= len(ids) < self._context_length:
                raise RolloutError(
                    f"got a sequence of {len(ids)} tokens; need 2 to {self._context_length - 1}"
                )
        self._num_scoring += 1
        try:
            return [
                await self._wait(self._score(ids, temperature), "to score a sequence")
                for ids in sequences
            ]
        finally:
            self._num_scoring -= 1

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """See the base class. Refused in the same cases as `score`."""
        self._check_can_score()
        check_prompts(
            requests,
            self._context_length - 1,
            self._layout.vocab_size,
            any_temperature=Capability.PROMPT_LOGPROBS_AT_ANY_TEMPERATURE in self.capabilities,
        )
        # The library's answer about many tokens is large until it is converted.
        turns = asyncio.Semaphore(self._max_num_prompts)
        self._num_scoring += 1
        asking = [asyncio.ensure_future(self._prompt_answer(each, turns)) for each in requests]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            self._num_scoring -= 1

    async def _prompt_answer(
        self, request: PromptRequest, turns: asyncio.Semaphore
    ) -> PromptLogprobs:
        # Excluded tokens are rarely likely, so the larger second query is rarely needed.
        below = self._layout.vocab_size if request.below is None else request.below
        num_barred = max(0, self._layout.vocab_size - below) if request.num_top else 0
        async with turns:
            for num_top in (request.num_top, request.num_top + num_barred):
                rows = await self._wait(
                    self._prompt_rows(request, num_top), "to compute logprobs of a prompt"
                )
                if (answer := prompt_answer(request, rows)) is not None:
                    return answer
        raise RolloutError(
            f"{request.request_id}: {self._library} returned fewer logprobs than asked"
        )

    async def pause(self) -> None:
        """See the base class."""
        await self._wait(self._stop_sampling(), "to pause")
        self._paused = True

    async def resume(self) -> None:
        """See the base class; also raises RolloutError without confirmed weights."""
        self._check_can_serve()
        await self._wait(self._go_on_sampling(), "to resume")
        self._paused = False

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        wanted = None if request_ids is None else set(request_ids)
        hit = [s for s in self._in_flight if wanted is None or s.request.request_id in wanted]
        for sample in hit:
            sample.aborted = True  # also keeps it from starting
        if hit:
            await self._wait(self._abort([sample.name for sample in hit]), "to abort")

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class. At either level nothing is sampled before `wake_up`."""
        await self._see_ended()
        if self._in_flight:
            raise RolloutError("samples are in flight; drain or abort them before sleep")
        await self.wake_up()
        if level == "weights":
            self._version, self._pending, self._holds_weights = NO_VERSION, None, False
        await self._wait(self._free(level), "to sleep")
        self._sleeping = {"cache"} if level == "kv" else {*ALL_MEMORY}

    async def wake_up(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """See the base class."""
        if woken := self._sleeping.intersection(tags):
            left = self._sleeping - woken
            await self._wait(self._take_back(woken, samples=not left), "to wake up")
            self._sleeping = left
            if self._paused and not left:
                await self.pause()

    async def health(self) -> Health:
        """See the base class; unless closed, waits for an answer of the processes."""
        if not self._closed:
            await self._wait(self._ask(), "to answer a health check")
        return Health(self._can_serve(), self._version, len(self._in_flight))

    async def close(self) -> None:
        """See the base class. Requests in flight are delivered as `abort`."""
        if self._closed:
            return
        if not self._is_lost:
            await self.abort()
        self._closed = True
        if self._in_flight:
            await asyncio.wait(self._in_flight.values(), timeout=self._timeout_s)
        await self._end()

    @property
    @abstractmethod
    def _is_lost(self) -> bool:
        """True if the processes are gone."""

    @abstractmethod
    async def _sample(self, sample: RunningSample) -> Completion:
        """Sample to the end; when cancelled, have the processes drop the sample.

        The processes must know the sample before this coroutine first yields, else it must check
        `RunningSample.aborted` once they do: an abort reaches only known samples.
        """

    @abstractmethod
    def _check_request(self, request: RolloutRequest) -> None:
        """Raise a RolloutError for what the library would refuse or silently change."""

    @abstractmethod
    async def _load(self, order: str) -> Sequence[str]:
        """Have every process execute an order of `order_of` and drop caches; return the replies."""

    async def _load_adapter(self, source: WeightSource) -> WeightDigest:
        raise WeightSyncError(f"this {self._library} was not made for an adapter")

    @abstractmethod
    async def _name_version(self, version: int) -> None:
        """Label all tokens sampled from now on with `version`."""

    @abstractmethod
    async def _score(self, ids: Sequence[int], temperature: float) -> tuple[float, ...]:
        """Return the logprob of every token but the first."""

    @abstractmethod
    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        """Return the logprobs from `request.first` on, with `num_top` likeliest tokens each."""

    @abstractmethod
    async def _stop_sampling(self) -> None:
        """See `pause`."""

    @abstractmethod
    async def _go_on_sampling(self) -> None:
        """See `resume`."""

    @abstractmethod
    async def _abort(self, names: Sequence[str]) -> None:
        """End the named samples; names that the processes do not know are ignored."""

    @abstractmethod
    async def _free(self, level: SleepLevel) -> None:
        """See `sleep`."""

    @abstractmethod
    async def _take_back(self, tags: Collection[MemoryTag], *, samples: bool) -> None:
        """See `wake_up`; with `samples` all memory is awake then, and sampling goes on."""

    @abstractmethod
    async def _ask(self) -> None:
        """Return as soon as the processes have answered a call."""

    @abstractmethod
    async def _end(self) -> None:
        """End the processes and free everything."""

    async def _announce(self, version: int) -> None:
        await self._wait(self._name_version(version), "to note the version")

    def _can_serve(self) -> bool:
        return super()._can_serve() and not self._is_lost

    def _check_can_serve(self) -> None:
        if not self._closed and self._is_lost:
            raise ReplicaLostError(f"{self._library} has died; its own log lines say why")
        super()._check_can_serve()

    def _check_can_score(self) -> None:
        self._check_can_serve()
        if self._paused:
            raise RolloutError(f"{self._library} computes nothing while it is paused; resume it")

    async def _prepare_update(self, version: int) -> None:
        self._check_can_update(version)
        await self._see_ended()
        if self._num_scoring or (self._in_flight and not self._paused):
            raise WeightSyncError("samples are in flight; drain, pause or abort them first")

    async def _see_ended(self) -> None:
        """Wait for aborted or abandoned samples, which a library may end with a delay."""
        ending = [s for s in self._in_flight if s.aborted or s.call not in self._calls]
        if ending:
            await asyncio.wait([self._in_flight[each] for each in ending], timeout=END_DEADLINE_S)
        if num_left := len(self._in_flight.keys() & set(ending)):
            raise DeadlineError(
                f"{num_left} aborted samples of {self._library} to end", END_DEADLINE_S
            )

    async def _compute(self, sample: RunningSample) -> None:
        result = sample.empty() if sample.aborted else await self._sample(sample)
        self._in_flight.pop(sample, None)
        self._deliver(sample.call, result)

    def _ended(self, sample: RunningSample, task: "asyncio.Task[None]") -> None:
        self._in_flight.pop(sample, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            kind = ReplicaLostError if self._is_lost else RolloutError
            failure = kind(f"sampling failed: {error}")
            failure.__cause__ = error
            self._deliver(sample.call, failure)

    def _forget_call(self, call: int) -> None:
        if call not in self._calls:
            return  # a second cancellation would interrupt the first one's clean-up
        super()._forget_call(call)
        for sample, task in self._in_flight.items():
            if sample.call == call:
                task.cancel()

    async def _wait(self, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise DeadlineError(f"{self._library} {what}", self._timeout_s) from None
        except self._deaths as error:
            raise ReplicaLostError(f"{self._library} died while we waited for it {what}") from error
