"""Replicas of a rollout engine behind one event loop: what samples for trainers and evaluations.

Promises: every sample of every request exactly once, in the order asked for, or an error by the
deadline; request i is sampled by replica i mod N, so that what a replica samples depends on the
requests alone; all replicas serve one version, or none serves; nothing is sampled from weights
that were not confirmed by every replica.
Does not promise: to go on without a replica.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from engines.errors import WeightSyncError
from engines.rollout.base import Health, RolloutEngine
from engines.rollout.collect import collect
from engines.rollout.event_loop import EventLoopThread
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import Receipt, ReceiverGoneError, SyncReport, Transport
from infra.errors import PipelineError

T = TypeVar("T")
ANSWER_DEADLINE_S = 60.0
"""Of a question that does no work; beside it, how much longer than an engine its caller waits."""


class RolloutService:
    """See the module.

    Args:
        replicas: engines that nobody else calls; this service closes them.
        timeout_s: deadline of one batch of requests, and of one weight update.
    """

    def __init__(self, replicas: Sequence[RolloutEngine], timeout_s: float) -> None:
        self._replicas = tuple(replicas)
        self._timeout_s = timeout_s
        self._loop = EventLoopThread("rollout-service")

    @property
    def num_replicas(self) -> int:
        """How many engines sample."""
        return len(self._replicas)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Sample every request and wait for all of it.

        Args:
            requests: with ids that differ.

        Returns:
            For each request its completions, in the order of its seeds.

        Raises:
            RolloutError: a replica refused a request, or lost or doubled a sample.
            DeadlineError: samples are unfinished at the deadline.
        """
        shares = [requests[first :: self.num_replicas] for first in range(self.num_replicas)]

        async def share(replica: RolloutEngine, place: int) -> list[list[Completion]]:
            return await collect(replica, shares[place], self._timeout_s)

        deadline_s = self._timeout_s + ANSWER_DEADLINE_S
        what = f"{len(requests)} requests to be sampled"
        results = self._loop.run(self._on_each(share), what, deadline_s)
        rows: list[list[Completion]] = [[] for _ in requests]
        for first, result in enumerate(results):
            rows[first :: self.num_replicas] = result
        return rows

    def sync(
        self, transport: Transport, send: Callable[[Transport], Receipt], version: int
    ) -> SyncReport:
        """Have every replica take new weights, and serve them once all hold what was sent.

        Args:
            transport: brings them to each replica, in the order of the replicas.
            send: has the trainer send through it; called in this thread.
            version: number of the weights.

        Returns:
            What was sent.

        Raises:
            WeightSyncError: a replica did not take them, or holds something else; none of them
                generates until a sync succeeds.
            DeadlineError: the weights did not arrive in time.
        """
        start = time.monotonic()
        sources = transport.sources

        async def update(replica: RolloutEngine, place: int) -> Receipt:
            return await replica.update_weights(sources[place], version)

        async def finish(replica: RolloutEngine, _: int) -> None:
            await replica.finish_update(version, sent.digest)

        try:
            sent, receipts = self._transfer(transport, send, update, version)
        finally:
            transport.stop()
        for place, held in enumerate(receipts):
            if held != sent:
                raise WeightSyncError(
                    f"version {version}: sent {sent}, replica {place} holds {held}; it will not "
                    "generate from them"
                )
        self._loop.run(self._on_each(finish), f"version {version} to be served", ANSWER_DEADLINE_S)
        return SyncReport(version, sent, time.monotonic() - start)

    def _transfer(
        self,
        transport: Transport,
        send: Callable[[Transport], Receipt],
        update: Callable[[RolloutEngine, int], Coroutine[Any, Any, Receipt]],
        version: int,
    ) -> tuple[Receipt, list[Receipt]]:
        """What was sent, and what each replica holds."""

        def stop_unless_arrived(arriving: Future[list[Receipt]]) -> None:
            if arriving.cancelled() or arriving.exception() is not None:
                transport.stop()

        what = f"weights of version {version} to arrive"
        arriving = self._loop.start(self._on_each(update))
        arriving.add_done_callback(stop_unless_arrived)
        try:
            sent = send(transport)
        except ReceiverGoneError:
            self._loop.wait(arriving, what, ANSWER_DEADLINE_S)  # raises why
            raise
        except BaseException:
            transport.stop()
            with contextlib.suppress(PipelineError):  # theirs follows from ours
                self._loop.wait(arriving, what, ANSWER_DEADLINE_S)
            raise
        return sent, self._loop.wait(arriving, what, self._timeout_s)

    def health(self) -> list[Health]:
        """What each replica says of itself, also while others call `generate`."""

        async def ask(replica: RolloutEngine, _: int) -> Health:
            return await replica.health()

        return self._loop.run(self._on_each(ask), "health of the replicas", ANSWER_DEADLINE_S)

    def abort(self) -> None:
        """End all requests in flight; their partial samples come out as `abort`."""

        async def end(replica: RolloutEngine, _: int) -> None:
            await replica.abort()

        self._loop.run(self._on_each(end), "the replicas to abort", ANSWER_DEADLINE_S)

    def close(self) -> None:
        """Close the replicas and the loop; harmless when repeated."""
        replicas, self._replicas = self._replicas, ()
        try:
            for replica in replicas:
                self._loop.run(replica.close(), "a replica to close", ANSWER_DEADLINE_S)
        finally:
            self._loop.close()

    async def _on_each(
        self, call: Callable[[RolloutEngine, int], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Call every replica at once; the first error ends the other calls."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(call(replica, place))
                    for place, replica in enumerate(self._replicas)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]
