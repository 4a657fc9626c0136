"""Replicas of a rollout engine behind one event loop, for trainers and evaluations.

Promises: every sample of every request exactly once, in the order of the requests. All replicas
that take requests serve one version of confirmed weights. A lost replica is replaced, as often as
allowed, and gets the published weights before it serves.
Does not promise: that samples are finished (at the deadline they are returned as `abort`), or that
a callback that never returns is interrupted.
"""

import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from engines.config.rollout import RoutingName
from engines.errors import ReplicaLostError, RolloutError
from engines.rollout.base import Health, RolloutEngine
from engines.rollout.batch_run import ABORT_DEADLINE_S, BatchRun, SampleRun
from engines.rollout.collect import Arrivals, PromptLedger, Receive, Request, SampleLedger
from engines.rollout.event_loop import EventLoopThread
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.publishing import (
    ANSWER_DEADLINE_S,
    NewTransport,
    Passage,
    Probe,
    Publication,
    Publisher,
    Send,
)
from engines.rollout.replica_pool import ReplicaPool, RestartPolicy
from engines.rollout.replica_state import ReplicaSlot, ReplicaState
from engines.rollout.routing import ByPlace, LeastLoaded, Routing
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import SyncReport
from infra.errors import DeadlineError, PipelineError

T = TypeVar("T")

HAND_OVER_S = 0.25


class RolloutService:
    """Serves requests with replicas, which it owns and closes.

    Args:
        timeout_s: after which samples of a batch are aborted; also the deadline of a weight update.
        restarts: None: the loss of a replica is an error.
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
    def num_replicas(self) -> int:
        """Number of places for replicas."""
        return len(self._pool.slots)

    @property
    def num_restarts(self) -> int:
        """Number of replicas that were lost and replaced."""
        return self._pool.num_restarts

    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample requests with distinct ids; return the completions of each, ordered by seed.

        Samples that are unfinished at the deadline have the finish reason `abort`. `on_completion`
        is called once per finished sample in this thread while others are sampled. It should be
        quick, since late replicas wait for it; an error that it raises ends the batch.

        Raises:
            RolloutError: no published weights, a refused request, a lost or doubled sample, or a
                replica lost for good.
            DeadlineError: not one sample was finished at the deadline.
        """
        arrivals = Arrivals(on_completion)
        ledger = SampleLedger(requests, arrivals.note)
        deadline_s = self.timeout_s + 2 * ABORT_DEADLINE_S + ANSWER_DEADLINE_S
        what = f"{len(requests)} requests to be sampled"
        try:
            self._attend(
                lambda: self._sample(requests, ledger, arrivals),
                what,
                deadline_s,
                arrivals.hand_over,
            )
        except BaseException:
            if arrivals.refused:
                self._end_early(arrivals)
            raise
        return ledger.rows()

    def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """Answer requests with distinct ids about given tokens, in their order.

        Raises:
            RolloutError: no published weights, a refused request, or a replica lost for good.
            DeadlineError: answers are missing after `timeout_s`.
        """
        ledger = PromptLedger(requests)
        what = f"logprobs of {len(requests)} sequences"
        self._attend(lambda: self._ask(requests, ledger), what, self.timeout_s)
        return ledger.rows()

    def sync(
        self,
        new_transport: NewTransport,
        send: Send,
        version: int,
        probe: Probe | None = None,
        adapter: Passage | None = None,
    ) -> SyncReport:
        """Send new weights to every replica; they serve once all hold what was sent.

        Args:
            new_transport: makes the delivery, from the number of workers of each replica.
            send: has the trainer send; called in this thread, also for late replicas until the next
                `sync`.
            adapter: sends an adapter alone; then the weights go only to replicas that lack them.

        Raises:
            WeightSyncError: a replica lacks the weights or fails the probe; no replica generates
                then.
            RolloutError: replicas were lost for good.
            DeadlineError: the weights did not arrive in time.
        """
        weights = Passage(new_transport, send)
        return self._publisher.publish(Publication(weights, adapter, version, probe))

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
        """End all requests in flight; their partial samples are delivered as `abort`."""
        self._on_each(lambda engine: engine.abort(), "the replicas to abort")

    def close(self) -> None:
        """Close the replicas and the loop; may be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.run(
                self._pool.close(lambda engine: engine.close()),
                "the replicas to close",
                ANSWER_DEADLINE_S,
            )
        finally:
            self._loop.close()

    def _attend(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        what: str,
        deadline_s: float,
        hand_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for work of the replicas, and send weights to those that start meanwhile.

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

    async def _sample(
        self, requests: Sequence[RolloutRequest], ledger: SampleLedger, arrivals: Arrivals
    ) -> None:
        try:
            with self._pool.listening(self._news.set):
                await SampleRun(self._pool, self._routing(requests), ledger, self.timeout_s).run()
        finally:
            arrivals.over.set()

    def _end_early(self, arrivals: Arrivals) -> None:
        arrivals.over.wait(ANSWER_DEADLINE_S)
        with suppress(PipelineError):  # the error that ended the batch is raised
            self.abort()

    async def _ask(self, requests: Sequence[PromptRequest], ledger: PromptLedger) -> None:
        with self._pool.listening(self._news.set):
            await BatchRun(self._pool, self._routing(requests), ledger).run()

    def _routing(self, requests: Sequence[Request]) -> Routing[Request]:
        if self._routing_name == "by_place":
            return ByPlace(requests, self.num_replicas)
        return LeastLoaded(requests, self._sessions)

    def _on_each(
        self, call: Callable[[RolloutEngine], Coroutine[Any, Any, T]], what: str
    ) -> list[T]:

        async def ask(slot: ReplicaSlot) -> list[T]:
            engine = slot.engine
            try:
                return [await call(engine)]
            except ReplicaLostError as error:
                self._pool.lose(slot, engine, error)
                return []

        up = [slot for slot in self._pool.slots if slot.is_up]
        started: list[Future[list[T]]] = [self._loop.start(ask(slot)) for slot in up]
        end = time.monotonic() + ANSWER_DEADLINE_S
        found: list[T] = []
        for future in started:
            try:
                found += self._loop.wait(future, what, max(0.0, end - time.monotonic()))
            except DeadlineError:
                raise DeadlineError(what, ANSWER_DEADLINE_S) from None
        return found
