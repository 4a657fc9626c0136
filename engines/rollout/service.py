"""Replicas of a rollout engine behind one event loop, for trainers and evaluations.

Promises: every sample of every request exactly once, in the order of the requests, also when
replicas are lost. All replicas that take requests serve one version of confirmed weights. A lost
replica is replaced, as often as allowed, and gets the published weights before it serves.
Does not promise: that samples are finished (at the deadline they are returned as `abort`, with the
tokens they have), or that a callback that never returns is interrupted.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from engines.config.rollout import RoutingName
from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.base import Health, RolloutEngine
from engines.rollout.collect import Ledger, PromptLedger, Receive, Request, SampleLedger
from engines.rollout.event_loop import EventLoopThread
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.publishing import (
    ANSWER_DEADLINE_S,
    NewTransport,
    Probe,
    Publication,
    Publisher,
    Send,
    WeightRoute,
)
from engines.rollout.replica_pool import (
    ByPlace,
    LeastLoaded,
    ReplicaPool,
    ReplicaSlot,
    ReplicaState,
    RestartPolicy,
    Routing,
    Share,
)
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import SyncReport
from infra.errors import DeadlineError, PipelineError

ABORT_DEADLINE_S = 30.0
"""A replica that has not ended its samples this long after an abort counts as lost."""
T = TypeVar("T")
HAND_OVER_S = 0.25
"""Interval at which finished samples are passed to `on_completion`."""


class BatchRun(Generic[Request]):
    """Distributes one batch over the replicas, and has lost shares answered again."""

    def __init__(
        self, pool: ReplicaPool, routing: Routing[Request], ledger: Ledger[Request]
    ) -> None:
        self._pool, self._routing, self._ledger = pool, routing, ledger
        self._running: dict[
            asyncio.Task[None], tuple[ReplicaSlot, RolloutEngine, Share[Request]]
        ] = {}
        self._changed = asyncio.Event()

    async def run(self, timeout_s: float | None = None) -> bool:
        """Fill the ledger; return False if shares were aborted after `timeout_s`.

        Raises:
            RolloutError: a refused request, a lost or doubled answer, or a replica lost for good.
        """
        watching = asyncio.get_running_loop().create_task(self._pool.watch())
        deadline = asyncio.timeout(timeout_s)
        try:
            with self._pool.listening(self._changed.set):
                async with deadline:
                    await self._fill()
        except TimeoutError:
            if not deadline.expired():
                raise
            await self._abort()
        finally:
            await _end([watching, *self._running])
            for task in list(self._running):
                self._forget(task)
        return not deadline.expired()

    async def _fill(self) -> None:
        while self._routing.waiting or self._running:
            if self._pool.failure is not None:
                raise self._pool.failure
            for place, share in self._routing.take(self._pool.loads()):
                self._start(self._pool.slots[place], share)
            await self._changed.wait()
            self._changed.clear()
            for task, (slot, engine, _) in list(self._running.items()):
                if task.done():
                    self._settle(task)
                elif slot.engine is not engine or not slot.is_up:
                    await _end([task])
                    self._settle(task)

    async def _abort(self) -> None:
        """End the running shares; a replica that does not end them by the deadline is lost."""
        running = dict(self._running)
        if running:
            aborts = (_abort_on(engine) for _, engine, _ in running.values())
            await asyncio.wait(
                [*running, *map(asyncio.ensure_future, aborts)], timeout=ABORT_DEADLINE_S
            )
        for task, (slot, engine, _) in running.items():
            if not task.done():
                silent = f"replica {slot.place}: did not abort in {ABORT_DEADLINE_S:g} s"
                self._pool.lose(slot, engine, ReplicaLostError(silent))
        await _end(running)
        for task in running:
            self._settle(task)

    def _start(self, slot: ReplicaSlot, share: Share[Request]) -> None:
        slot.num_in_flight += share.num_samples
        task = asyncio.get_running_loop().create_task(
            self._ledger.collect_share(slot.engine, share.requests)
        )
        task.add_done_callback(lambda _: self._changed.set())
        self._running[task] = (slot, slot.engine, share)

    def _settle(self, task: "asyncio.Task[None]") -> None:
        slot, engine, share = self._forget(task)
        if not task.cancelled():
            if (error := task.exception()) is None:
                return
            if not isinstance(error, ReplicaLostError):
                raise error
            self._pool.lose(slot, engine, error)
        self._routing.lost(share, self._ledger)

    def _forget(
        self, task: "asyncio.Task[None]"
    ) -> tuple[ReplicaSlot, RolloutEngine, Share[Request]]:
        slot, engine, share = self._running.pop(task)
        if slot.engine is engine:
            slot.num_in_flight -= share.num_samples
        return slot, engine, share


async def _abort_on(engine: RolloutEngine) -> None:
    # The share that runs there reports the loss, too.
    with suppress(ReplicaLostError):
        await engine.abort()


async def _end(tasks: Iterable["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RolloutService:
    """Serves requests with replicas, which it owns and closes.

    Args:
        timeout_s: time until a batch's open samples are aborted; also limits a weight update.
        restarts: None makes the loss of a replica an error.
    """

    def __init__(
        self,
        replicas: Sequence[RolloutEngine],
        timeout_s: float,
        routing: RoutingName = "by_place",
        restarts: RestartPolicy | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._routing_name = routing
        self._sessions: dict[str, int] = {}
        self._pool = ReplicaPool(replicas, restarts)
        self._loop = EventLoopThread("rollout-service")
        self._publisher = Publisher(self._pool, self._loop, timeout_s)
        self._news = threading.Event()
        self._closed = False

    @property
    def num_restarts(self) -> int:
        """Number of restarts of lost replicas, failed ones included."""
        return self._pool.num_restarts

    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample requests with distinct ids; return the completions of each, ordered by seed.

        Samples that are unfinished at the deadline have the finish reason `abort`. `on_completion`
        is called once per finished sample in this thread while others are sampled. It should be
        quick, since late replicas wait for it; an error that it raises ends the batch.

        Raises:
            RolloutError, WeightSyncError: no published weights, a refused request, a lost or double
                sample, a replica lost for good, or a late one that cannot get the weights.
            DeadlineError: not one sample was finished at the deadline.
        """
        ledger = SampleLedger(requests, on_completion)
        try:
            self._attend(
                lambda: self._sample(requests, ledger),
                f"{len(requests)} requests to be sampled",
                self.timeout_s + 2 * ABORT_DEADLINE_S + ANSWER_DEADLINE_S,
                ledger.hand_over,
            )
        finally:
            if ledger.refused:
                ledger.over.wait(ANSWER_DEADLINE_S)
                with suppress(PipelineError):  # the error that ended the batch is raised
                    self.abort()
        return ledger.rows()

    def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """Answer requests with distinct ids about given tokens, in their order.

        Raises:
            RolloutError: no published weights, a refused request, or a replica lost for good.
            DeadlineError: answers are missing after `timeout_s`.
        """
        ledger = PromptLedger(requests)
        self._attend(
            lambda: self._run(requests, ledger),
            f"logprobs of {len(requests)} sequences",
            self.timeout_s,
        )
        return ledger.rows()

    def sync(
        self,
        new_transport: NewTransport,
        send: Send,
        version: int,
        probe: Probe | None = None,
        adapter: WeightRoute | None = None,
        leave_device: Callable[[], object] = lambda: None,
    ) -> SyncReport:
        """Send new weights to every replica; they serve once all hold what was sent.

        Args:
            new_transport: makes the delivery.
            send: has the trainer send; called in this thread, also for late replicas until the next
                `sync`.
            adapter: sends an adapter alone; then the weights go only to replicas that lack them.
            leave_device: see `Publication`.

        Raises:
            WeightSyncError: a replica lacks the weights or fails the probe; no replica generates
                then.
            RolloutError: replicas were lost for good.
            DeadlineError: the weights did not arrive in time.
        """
        return self._publisher.publish(
            Publication(WeightRoute(new_transport, send), adapter, version, probe, leave_device)
        )

    def sleep(self) -> None:
        """Have every replica free its memory; nothing is sampled until the next `sync`.

        Raises:
            RolloutError: samples are in flight, or replicas were lost for good.
            DeadlineError: a restarting replica did not come up in time.
        """
        self._publisher.retire()

    def health(self) -> list[Health]:
        """Return the health of each running replica; also possible while others call `generate`."""
        return self._on_each(lambda engine: engine.health(), "health of the replicas")

    def states(self) -> list[ReplicaState]:
        """Return the state of each replica, by place."""
        return [slot.state for slot in self._pool.slots]

    def abort(self) -> None:
        """End all requests in flight; their partial samples get the finish reason `abort`."""
        self._on_each(lambda engine: engine.abort(), "the replicas to abort")

    def close(self) -> None:
        """Close the replicas and the loop; may be repeated."""
        if not self._closed:
            self._closed = True
            try:
                self._loop.run(self._pool.close(), "the replicas to close", ANSWER_DEADLINE_S)
            finally:
                self._loop.close()

    def _attend(
        self,
        work: Callable[[], Coroutine[Any, Any, object]],
        what: str,
        deadline_s: float,
        hand_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until `work` ends; meanwhile send weights to replicas that start.

        Results are handed over every `HAND_OVER_S`: a thread that wakes for each sample would
        compete for the interpreter with engines in this process.
        """
        if self._publisher.published is None:
            raise RolloutError("the replicas have no confirmed weights; send them first")
        end = time.monotonic() + deadline_s
        working = self._loop.start(work())
        working.add_done_callback(lambda _: self._news.set())
        try:
            while not working.done():
                # In this thread and not in the loop: the trainer, whose thread this is, sends.
                self._publisher.renew()
                hand_over()
                left_s = end - time.monotonic()
                if not self._news.wait(max(0.0, min(left_s, HAND_OVER_S))) and left_s < HAND_OVER_S:
                    raise DeadlineError(what, deadline_s)
                self._news.clear()
            working.result()
            hand_over()
        finally:
            working.cancel()

    async def _sample(self, requests: Sequence[RolloutRequest], ledger: SampleLedger) -> None:
        try:
            is_complete = await self._run(requests, ledger, self.timeout_s)
        finally:
            ledger.over.set()
        if not is_complete and not ledger.abort_missing():
            raise DeadlineError("one sample to be finished (rollout.timeout_s)", self.timeout_s)

    async def _run(
        self,
        requests: Sequence[Request],
        ledger: Ledger[Request],
        timeout_s: float | None = None,
    ) -> bool:
        routing: Routing[Request] = (
            ByPlace(requests, len(self._pool.slots))
            if self._routing_name == "by_place"
            else LeastLoaded(requests, self._sessions)
        )
        with self._pool.listening(self._news.set):
            return await BatchRun(self._pool, routing, ledger).run(timeout_s)

    def _on_each(
        self, call: Callable[[RolloutEngine], Coroutine[Any, Any, T]], what: str
    ) -> list[T]:
        """Call all running replicas at once; return the answers of those that are not lost."""

        async def in_time(slot: ReplicaSlot) -> T:
            try:
                async with asyncio.timeout(ANSWER_DEADLINE_S):
                    return await call(slot.engine)
            except TimeoutError:
                raise DeadlineError(f"{what} (replica {slot.place})", ANSWER_DEADLINE_S) from None

        asking = self._pool.ask((slot for slot in self._pool.slots if slot.is_up), in_time)
        return [answer for _, answer in self._loop.run(asking, what, 2 * ANSWER_DEADLINE_S)]
