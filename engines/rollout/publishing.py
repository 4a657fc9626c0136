"""Sends the trainer's weights to the replicas, and verifies that the replicas serve them.

Promises: a replica serves only after its weight digest equals the sender's, it confirmed (version,
digest), and the prompt of the probe, if any, which it may have cached before the update, gets the
trainer's logprobs. A lost replica that may be restarted does not stop the others. A late replica
gets the same weights, checked by the sender's digest.
Does not promise: that a replica serves before the slowest one has its weights.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.errors import ReplicaLostError, WeightSyncError
from engines.rollout.base import RolloutEngine, wake
from engines.rollout.collect import collect
from engines.rollout.event_loop import EventLoopThread
from engines.rollout.replica_pool import SILENCE, ReplicaPool, ReplicaSlot, ReplicaState, silence
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import (
    Delivery,
    ReceiverGoneError,
    SyncReport,
    WeightDigest,
    WeightSource,
)
from infra.errors import DeadlineError, PipelineError

ANSWER_DEADLINE_S = 60.0
"""Deadline of a call that does no work."""
PROBE_DEADLINE_S = 300.0
"""Deadline of a probe; long, since an engine may compile kernels for its first request."""
RESTART_DEADLINE_S = 900.0
"""Deadline for lost replicas to be up again."""

NewTransport = Callable[[Sequence[int]], Delivery]
"""Makes a delivery, given the number of workers of the replica in each place; 0 takes no part."""
Send = Callable[[Any], WeightDigest]
"""Sends weights through a delivery that a `NewTransport` made; returns their digest."""
MOVES = "the states of replicas"
LATE = "replica {}: did not take weights in time"


class Probe(ABC):
    """Final check of a replica before it serves."""

    @abstractmethod
    def request(self, place: int, version: int) -> RolloutRequest:
        """Return the probe request: one sample of a prompt longer than a prefix cache block."""

    @abstractmethod
    def check(self, requests: Sequence[RolloutRequest], found: Sequence[Completion]) -> None:
        """Compare with the trainer, in its thread; raise WeightSyncError if the logprobs differ."""


@dataclass(frozen=True)
class WeightRoute:
    """Functions that bring tensors to replicas."""

    new_transport: NewTransport
    send: Send


@dataclass(frozen=True)
class Publication:
    """Routes, version and probe of a weight update, also for replicas that start before the next.

    With an `adapter`, `weights` sends its frozen base weights, once per replica. `adapter` is None
    if the trainer has no adapter or merges it into the weights. `leave_device` takes the trainer
    off devices that it shares with replicas; called before they wake their weights, and again after
    sending, before they wake their caches.
    """

    weights: WeightRoute
    adapter: WeightRoute | None
    version: int
    probe: Probe | None
    leave_device: Callable[[], object] = lambda: None


class Publisher:
    """Publishes weights to the replicas of a pool; called from the trainer's thread."""

    def __init__(self, pool: ReplicaPool, loop: EventLoopThread, timeout_s: float) -> None:
        self._pool, self._loop, self._timeout_s = pool, loop, timeout_s
        self.published: tuple[Publication, WeightDigest] | None = None
        self._frozen = _FrozenWeights()

    def publish(self, publication: Publication) -> SyncReport:
        """Give every running replica new weights; see `RolloutService.sync`."""
        start = time.monotonic()
        if publication.adapter is None:
            self._frozen = _FrozenWeights()
        self._withdraw()
        sent: WeightDigest | None = None
        while sent is None or not self._pool.in_state(ReplicaState.HEALTHY):
            self._await(lambda: bool(self._pool.in_state(ReplicaState.STALE)))
            sent = self._give(self._pool.in_state(ReplicaState.STALE), publication, None)
        self.published = publication, sent
        return SyncReport(publication.version, sent, time.monotonic() - start)

    def retire(self) -> None:
        """Put every replica to sleep; see `RolloutService.sleep`."""
        self._withdraw()
        self._frozen = _FrozenWeights()
        self._each(
            self._pool.in_state(ReplicaState.STALE),
            lambda slot: slot.engine.sleep(),
            "memory to be given back",
        )
        # A starting replica takes memory before it frees it, which must not happen during training.
        self._await(lambda: not self._pool.in_state(ReplicaState.DEAD, ReplicaState.RESTARTING))

    def renew(self) -> None:
        """Give the last publication to replicas that started since.

        Raises:
            WeightSyncError: the trainer holds other weights by now, or a replica refused them.
        """
        if self.published is not None and (late := self._pool.in_state(ReplicaState.STALE)):
            self._give(late, *self.published)

    def _give(
        self, slots: Sequence[ReplicaSlot], publication: Publication, expected: WeightDigest | None
    ) -> WeightDigest | None:
        """Make slots serve `publication`; return the digest, None if sending lost a replica."""
        publication.leave_device()
        slots = self._each(slots, lambda slot: wake(slot.engine, ["weights"]), "weights to wake up")
        version, adapter, sent = publication.version, publication.adapter, None
        if slots and adapter is None:
            sent = self._ship(_Transfer(slots, version), publication.weights, expected)
        elif slots and adapter is not None and self._send_frozen(slots, publication):
            sent = self._ship(_Transfer(slots, version, is_adapter=True), adapter, expected)
        if sent is None:
            return None
        publication.leave_device()

        async def serve(slot: ReplicaSlot) -> None:
            await wake(slot.engine, ["cache"])
            await slot.engine.finish_update(version, sent.digest)

        left = self._each(slots, serve, f"version {version} to be served")
        self._move(self._probe(left, publication), ReplicaState.HEALTHY)
        return sent

    def _send_frozen(self, slots: Sequence[ReplicaSlot], publication: Publication) -> bool:
        """Send the adapter's base weights to slots that lack them; True if all have them now."""
        bare = [slot for slot in slots if slot.engine is not self._frozen.held_by.get(slot.place)]
        if not bare:
            return True
        sent = self._ship(
            _Transfer(bare, publication.version), publication.weights, self._frozen.digest
        )
        if sent is not None:
            self._frozen.digest = sent
            self._frozen.held_by |= {slot.place: slot.engine for slot in bare}
        return sent is not None

    def _ship(
        self, transfer: "_Transfer", route: WeightRoute, expected: WeightDigest | None
    ) -> WeightDigest | None:
        """Send to all slots, compare digests; return the sent one, None if a replica was lost."""
        num_workers = [0] * len(self._pool.slots)
        for slot in transfer.slots:
            num_workers[slot.place] = slot.engine.num_workers
        transport = route.new_transport(num_workers)
        try:
            sent, failure = self._send(transfer, transport, route.send)
        finally:
            transport.stop()
        version, outcomes = transfer.version, transfer.outcomes
        found = [(slot, outcomes[slot.place]) for slot in transfer.slots]
        if lost := [(slot, held) for slot, held in found if isinstance(held, ReplicaLostError)]:
            self._loop.run(self._pool.lose_all(lost), MOVES, ANSWER_DEADLINE_S)
            self._raise_failure()
            return None
        if not isinstance(failure, DeadlineError):
            # In the order of arrival: the first stopped the others.
            refused = (each for each in outcomes.values() if isinstance(each, PipelineError))
            failure = next(refused, failure)
        if failure is not None:
            raise failure
        if expected is not None and sent != expected:
            raise WeightSyncError(
                f"version {version} was published as {expected}, the trainer holds {sent} now"
            )
        for slot, held in found:
            if held != sent:
                raise WeightSyncError(
                    f"version {version}: sent {sent}, replica {slot.place} holds {held}; it will "
                    "not generate from them"
                )
        return sent

    def _send(
        self, transfer: "_Transfer", transport: Delivery, send: Send
    ) -> tuple[WeightDigest | None, PipelineError | None]:
        """Return the sent digest, or why sending stopped; then every slot has an outcome."""
        arriving = self._loop.start(transfer.run(transport))
        sent, timeout_s = None, ANSWER_DEADLINE_S
        try:
            sent, timeout_s = send(transport), self._timeout_s
        except (ReceiverGoneError, DeadlineError) as error:
            return None, error
        finally:
            if sent is None:
                transport.stop()
            try:
                self._loop.wait(arriving, "weights to arrive", timeout_s)
            except DeadlineError:
                for slot in transfer.slots:
                    transfer.outcomes.setdefault(
                        slot.place, ReplicaLostError(LATE.format(slot.place))
                    )
        return sent, None

    def _probe(
        self, slots: Sequence[ReplicaSlot], publication: Publication
    ) -> Sequence[ReplicaSlot]:
        probe = publication.probe
        if probe is None:
            return slots
        requests = {slot.place: probe.request(slot.place, publication.version) for slot in slots}
        found: dict[int, Completion] = {}

        async def ask(slot: ReplicaSlot) -> None:
            [[found[slot.place]]] = await collect(
                slot.engine, [requests[slot.place]], 2 * PROBE_DEADLINE_S
            )

        left = self._each(slots, ask, "the probe after a sync", PROBE_DEADLINE_S)
        if left:
            probe.check([requests[place] for place in found], list(found.values()))
        return left

    def _each(
        self,
        slots: Iterable[ReplicaSlot],
        call: Callable[[ReplicaSlot], Coroutine[Any, Any, None]],
        what: str,
        deadline_s: float = ANSWER_DEADLINE_S,
    ) -> list[ReplicaSlot]:
        """Call the slots' replicas at once; return slots not lost, raise errors other than loss."""

        async def in_time(slot: ReplicaSlot) -> None:
            try:
                async with asyncio.timeout(deadline_s):
                    await call(slot)
            except SILENCE as error:
                raise silence(
                    f"replica {slot.place}: no answer while we waited for {what}", error
                ) from error

        # Not read from the states: a lost replica may be replaced by the end.
        left = self._loop.run(self._pool.ask(slots, in_time), what, 2 * deadline_s)
        self._raise_failure()
        return [slot for slot, _ in left]

    def _await(self, there: Callable[[], bool]) -> None:
        news = threading.Event()
        end = time.monotonic() + RESTART_DEADLINE_S
        with self._pool.listening(news.set):
            while not there():
                self._raise_failure()
                if not news.wait(max(0.0, end - time.monotonic())):
                    raise DeadlineError("a replica to start again", RESTART_DEADLINE_S)
                news.clear()

    def _withdraw(self) -> None:
        self.published = None
        self._move(
            self._pool.in_state(ReplicaState.HEALTHY, ReplicaState.SUSPECT), ReplicaState.STALE
        )

    def _move(self, slots: Sequence[ReplicaSlot], to: ReplicaState) -> None:
        self._loop.run(self._pool.move_all(slots, to), MOVES, ANSWER_DEADLINE_S)

    def _raise_failure(self) -> None:
        if self._pool.failure is not None:
            raise self._pool.failure


@dataclass
class _FrozenWeights:
    """The adapter's base weights: their digest, and by place the engine that holds them."""

    digest: WeightDigest | None = None
    held_by: dict[int, RolloutEngine] = field(default_factory=dict)


@dataclass
class _Transfer:
    """Has several replicas load one update, and records the outcomes.

    Attributes:
        outcomes: digest or error by place; a ReplicaLostError for a replica without an answer.
    """

    slots: Sequence[ReplicaSlot]
    version: int
    is_adapter: bool = False
    outcomes: dict[int, WeightDigest | PipelineError] = field(default_factory=dict)

    async def run(self, transport: Delivery) -> None:
        """Load the tensors into all replicas; the first failure stops the sender."""
        sources = transport.sources
        await asyncio.gather(
            *(self._take(slot, sources[slot.place], transport) for slot in self.slots)
        )

    async def _take(self, slot: ReplicaSlot, source: WeightSource, transport: Delivery) -> None:
        engine = slot.engine
        update = engine.update_adapter if self.is_adapter else engine.update_weights
        try:
            # An answer after the deadline changes nothing: the replica counts as lost.
            self.outcomes.setdefault(slot.place, await update(source, self.version))
        except SILENCE as error:
            self.outcomes.setdefault(slot.place, silence(LATE.format(slot.place), error))
        except PipelineError as error:
            self.outcomes.setdefault(slot.place, error)
        finally:
            if not isinstance(self.outcomes.get(slot.place), WeightDigest):
                transport.stop()  # else the sender would wait for this receiver
