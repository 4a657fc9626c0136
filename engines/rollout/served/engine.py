"""Base class of rollout engines whose library samples in processes of its own.

Promises: the contract of `engines.rollout.base`, provided the abstract methods do what they say.
Every wait has the deadline `rollout.timeout_s`, and its error names what was waited for.
Does not promise to score, or to return prompt logprobs, while paused: the library may compute
nothing then.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from engines.errors import ReplicaLostError, RolloutError, WeightSyncError
from engines.rollout.base import Capability, Health, RolloutEngine, SleepLevel
from engines.rollout.prompt_logprobs import (
    PromptLogprobs,
    PromptRequest,
    PromptRows,
    check_prompts,
    prompt_answer,
)
from engines.rollout.request_check import check_requests
from engines.rollout.served.in_flight import InFlight, Sampler
from engines.rollout.served.weight_receiver import ModelLayout, agreed, order_of
from engines.rollout.stop_strings import StopStrings
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from infra.errors import DeadlineError

T = TypeVar("T")
NO_VERSION = -1
END_DEADLINE_S = 30.0
"""Time for aborted or abandoned samples to end."""


class ServedEngine(RolloutEngine):
    """Library-independent part of an engine; subclasses implement the calls to the library.

    `max_num_prompts` limits the prompts whose logprobs are computed at a time.
    """

    def __init__(
        self,
        library: str,
        layout: ModelLayout,
        dtype: str,
        timeout_s: float,
        sampler: Sampler,
        stop_strings: StopStrings,
        context_length: int,
        max_num_prompts: int,
    ) -> None:
        self._library = library
        self._layout = layout
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._sampler = sampler
        self._context_length = context_length
        self._max_num_prompts = max_num_prompts
        self._in_flight = InFlight(sampler, stop_strings, timeout_s)
        self._num_scoring = 0
        self._version = NO_VERSION
        self._pending: tuple[int, str] | None = None
        self._asleep: SleepLevel | None = None
        self._paused = self._closed = self._holds_weights = False

    @property
    def version(self) -> int:
        """See the base class; also -1 from the start of an update until it is confirmed."""
        return self._version

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class. Requests are checked and queued at the call, before iteration."""
        self._check_can_serve()
        check_requests(
            requests,
            self._in_flight.sample_keys,
            self._context_length,
            self._layout.vocab_size,
            structured_output=Capability.STRUCTURED_OUTPUT in self.capabilities,
        )
        for request in requests:
            self._check_request(request)
        return self._in_flight.start(requests)

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Samples in flight need `pause` first; they continue after it."""
        await self._check_can_update(version)
        order = order_of(source, self._layout, self._dtype)
        self._version, self._pending, self._holds_weights = NO_VERSION, None, False
        receipt = agreed(await self._wait(self._load(order), "to load weights"))
        self._pending, self._holds_weights = (version, receipt.digest), True
        return receipt

    async def update_adapter(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class. Samples in flight need `pause` first; they continue with it."""
        await self._check_can_update(version)
        if not self._holds_weights:
            raise WeightSyncError("the rollout engine holds no weights for an adapter to stand on")
        self._version, self._pending = NO_VERSION, None
        receipt = await self._wait(self._load_adapter(source), "to load an adapter")
        self._pending = (version, receipt.digest)
        return receipt

    async def finish_update(self, version: int, digest: str) -> None:
        """See the base class."""
        if self._pending is None:
            raise WeightSyncError(f"version {version}: no complete update is waiting for it")
        if self._pending != (version, digest):
            raise WeightSyncError(
                f"asked to serve version {version} with digest {digest}, hold version "
                f"{self._pending[0]} with {self._pending[1]}"
            )
        await self._wait(self._name_version(version), "to note the version")
        self._version, self._pending = version, None

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
        longest, vocab_size = self._context_length - 1, self._layout.vocab_size
        any_temperature = Capability.PROMPT_LOGPROBS_AT_ANY_TEMPERATURE in self.capabilities
        check_prompts(requests, longest, vocab_size, any_temperature=any_temperature)
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
                call = self._prompt_rows(request, num_top)
                rows = await self._wait(call, "to say logprobs of a prompt")
                if (answer := prompt_answer(request, rows)) is not None:
                    return answer
        raise RolloutError(f"{request.request_id}: {self._library} named fewer tokens than asked")

    async def pause(self) -> None:
        """See the base class."""
        await self._wait(self._stop_sampling(), "to pause")
        self._paused = True

    async def resume(self) -> None:
        """See the base class; also a RolloutError without confirmed weights."""
        self._check_can_serve()
        await self._wait(self._go_on_sampling(), "to resume")
        self._paused = False

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        names = self._in_flight.mark_aborted(request_ids)
        if names:
            await self._wait(self._abort(names), "to abort")

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class. At either level nothing is sampled before `wake_up`."""
        await self._see_ended()
        if self._in_flight:
            raise RolloutError("samples are in flight; drain or abort them before sleep")
        await self.wake_up()
        if level == "weights":
            self._version, self._pending, self._holds_weights = NO_VERSION, None, False
        await self._wait(self._free(level), "to sleep")
        self._asleep = level

    async def wake_up(self) -> None:
        """See the base class."""
        if self._asleep:
            await self._wait(self._take_back(self._asleep), "to wake up")
            self._asleep = None
            if self._paused:
                await self.pause()

    async def health(self) -> Health:
        """See the base class; waits for an answer of the processes."""
        if not self._closed:
            await self._wait(self._ask(), "to say how it is")
        return Health(self._can_serve(), self._version, len(self._in_flight))

    async def close(self) -> None:
        """See the base class. Requests in flight are delivered as `abort`."""
        if self._closed:
            return
        if not self._sampler.is_lost:
            await self.abort()
        self._closed = True
        await self._in_flight.close()
        await self._end()

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
        """Give tokens that are sampled from now on this version."""

    @abstractmethod
    async def _score(self, ids: Sequence[int], temperature: float) -> tuple[float, ...]:
        """Return the logprob of every token but the first."""

    async def _prompt_rows(self, request: PromptRequest, num_top: int) -> PromptRows:
        """Return the logprobs from `request.first` on, with `num_top` likeliest tokens each."""
        raise RolloutError(f"{self._library} says no logprobs of a prompt")

    @abstractmethod
    async def _stop_sampling(self) -> None:
        """See `pause`."""

    @abstractmethod
    async def _go_on_sampling(self) -> None:
        """See `resume`."""

    @abstractmethod
    async def _abort(self, names: Sequence[str]) -> None:
        """End those of these samples that the processes know."""

    @abstractmethod
    async def _free(self, level: SleepLevel) -> None:
        """See `sleep`."""

    @abstractmethod
    async def _take_back(self, level: SleepLevel) -> None:
        """See `wake_up`."""

    @abstractmethod
    async def _ask(self) -> None:
        """Return as soon as the processes have answered a call."""

    @abstractmethod
    async def _end(self) -> None:
        """End the processes and free everything."""

    def _can_serve(self) -> bool:
        serves = self._version != NO_VERSION and not self._asleep and not self._closed
        return serves and not self._sampler.is_lost

    def _check_can_serve(self) -> None:
        if not self._closed and self._sampler.is_lost:
            raise ReplicaLostError(f"{self._library} has died; its own log lines say why")
        if not self._can_serve():
            raise RolloutError(self._refusal())

    def _check_can_score(self) -> None:
        self._check_can_serve()
        if self._paused:
            raise RolloutError(f"{self._library} computes nothing while it is paused; resume it")

    async def _check_can_update(self, version: int) -> None:
        if self._closed or self._asleep:
            raise WeightSyncError(self._refusal())
        if version < 0:
            raise WeightSyncError(f"version: got {version}; need 0 or more")
        await self._see_ended()
        if self._num_scoring or (self._in_flight and not self._paused):
            raise WeightSyncError("samples are in flight; drain, pause or abort them first")

    async def _see_ended(self) -> None:
        """Wait for aborted or abandoned samples, which a library may end with a delay."""
        if num_left := await self._in_flight.see_ended(END_DEADLINE_S):
            what = f"{num_left} aborted samples of {self._library} to end"
            raise DeadlineError(what, END_DEADLINE_S)

    def _refusal(self) -> str:
        if self._closed:
            return "the rollout engine is closed"
        if self._asleep:
            return "the rollout engine is asleep; wake it up first"
        return "the rollout engine has no confirmed weights; send them first"

    async def _wait(self, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise DeadlineError(f"{self._library} {what}", self._timeout_s) from None
