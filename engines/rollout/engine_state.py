"""Base class of this project's rollout engines: served version, pause, sleep, `generate` calls.

Promises: a call yields its samples as they are delivered, and ends with the first error or at its
deadline. A call is forgotten when its stream ends, or is deleted before it was iterated.
Does not promise to stop the samples of a call whose stream has ended; subclasses do.
"""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from engines.errors import RolloutError, WeightSyncError
from engines.rollout.base import MemoryTag, RolloutEngine
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError

NO_VERSION = -1
_Call = tuple[asyncio.Queue[Completion | RolloutError], list[tuple[str, int]]]
"""Results that the stream has not yielded yet, and (request id, sample index) of all samples."""


@dataclass(eq=False, slots=True)
class SampleOfCall:
    """One sample of a request in a `generate` call; `place` is the index of its seed."""

    request: RolloutRequest
    place: int
    call: int

    @property
    def key(self) -> tuple[str, int]:
        """Request id and sample index."""
        return self.request.request_id, self.request.sample_index(self.place)


class StatefulEngine(RolloutEngine):
    """Base class of this project's engines; a `generate` call fails after `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._version = NO_VERSION
        self._pending: tuple[int, str] | None = None
        self._paused = self._closed = False
        self._sleeping: set[MemoryTag] = set()
        self._call_numbers = itertools.count()
        self._calls: dict[int, _Call] = {}

    @property
    def version(self) -> int:
        """See the base class; also -1 from the start of an update until it is confirmed."""
        return self._version

    async def finish_update(self, version: int, digest: str) -> None:
        """See the base class."""
        if self._pending is None:
            raise WeightSyncError(f"version {version}: no complete update is waiting for it")
        if self._pending != (version, digest):
            raise WeightSyncError(
                f"asked to serve version {version} with digest {digest}, hold version "
                f"{self._pending[0]} with {self._pending[1]}"
            )
        await self._announce(version)
        self._version, self._pending = version, None

    async def _announce(self, version: int) -> None:
        """Prepare to sample from a version, which is served when this returns; no-op by default."""

    def _can_serve(self) -> bool:
        return self._version != NO_VERSION and not self._sleeping and not self._closed

    def _check_can_serve(self) -> None:
        if not self._can_serve():
            raise RolloutError(self._refusal())

    def _refusal(self) -> str:
        if self._closed:
            return "the rollout engine is closed"
        if self._sleeping:
            return "the rollout engine is asleep; wake it up first"
        return "the rollout engine has no confirmed weights; send them first"

    def _check_can_update(self, version: int) -> None:
        if self._closed or "weights" in self._sleeping:
            raise WeightSyncError(self._refusal())
        if version < 0:
            raise WeightSyncError(f"version: got {version}; need 0 or more")

    def _open_call(
        self, call: int, requests: Sequence[RolloutRequest]
    ) -> AsyncIterator[Completion]:
        """Register a call, and return the stream of its completions."""
        self._calls[call] = asyncio.Queue(), [key for each in requests for key in each.sample_keys]
        stream = self._stream(call, len(requests))
        weakref.finalize(stream, self._forget_call, call)  # for a stream that is never iterated
        return stream

    def _start_sampling(self) -> None:
        """Start to compute the samples of open calls; called when a stream is first iterated."""

    def _end_call(self, call: int) -> None:
        """Forget a call; a subclass may stop its samples. Called when an iterated stream ends."""
        self._forget_call(call)

    def _forget_call(self, call: int) -> None:
        self._calls.pop(call, None)

    def _keys_in_flight(self) -> Iterator[tuple[str, int]]:
        """Return (request id, sample index) of every sample of the open calls."""
        return (key for _, keys in self._calls.values() for key in keys)

    def _deliver(self, call: int, item: Completion | RolloutError) -> None:
        if call in self._calls:
            self._calls[call][0].put_nowait(item)

    async def _stream(self, call: int, num_requests: int) -> AsyncIterator[Completion]:
        queue, keys = self._calls[call]
        num_open = len(keys)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            self._start_sampling()
            while num_open:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await queue.get()
                except TimeoutError:
                    raise DeadlineError(
                        f"{num_open} samples of {num_requests} requests", self._timeout_s
                    ) from None
                if isinstance(item, RolloutError):
                    raise item
                num_open -= 1
                yield item
        finally:
            self._end_call(call)
