"""The replicas of a service: their states, which requests they get, their loss and restarts.

HEALTHY     serves the published weights
SUSPECT     did not answer in time; keeps its samples, gets no new ones
DEAD        its process ended, or it was silent for too long; its samples are redone
RESTARTING  another replica starts in its place
STALE       is up, without the published weights; gets no requests

Promises: a replica that dies, or stays silent while it samples, is ended and restarted, within the
allowed number of restarts. Requests of a lost replica are assigned again. Everything runs in the
event loop of the service.
Does not promise: weights. A new replica is STALE until the service gives it some.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from engines.errors import ReplicaLostError
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import Ledger, Request
from infra.errors import DeadlineError, PipelineError

T = TypeVar("T")
NUM_LOOKS = 3
"""Unanswered health checks in a row that fill `silence_s`."""
END_DEADLINE_S = 10.0
"""Time for a cancelled restart to end."""
SILENCE = (TimeoutError, DeadlineError)
"""A deadline passed without an answer: the caller's, or the engine's own."""
logger = logging.getLogger(__name__)


class ReplicaState(Enum):
    """State of a replica; explained in the module docstring."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    RESTARTING = "RESTARTING"
    STALE = "STALE"


_S = ReplicaState
TRANSITIONS: dict[tuple[ReplicaState, ReplicaState], str] = {
    (_S.HEALTHY, _S.SUSPECT): "it leaves a question about its health unanswered",
    (_S.SUSPECT, _S.HEALTHY): "it answers",
    (_S.SUSPECT, _S.STALE): "it is put to sleep, or new weights are about to be published",
    (_S.HEALTHY, _S.STALE): "it is put to sleep, or new weights are about to be published",
    (_S.HEALTHY, _S.DEAD): "its process ended",
    (_S.SUSPECT, _S.DEAD): "its process ended, or it was silent for `rollout.silence_s`",
    (_S.STALE, _S.DEAD): "its process ended, or it did not take the weights by the deadline",
    (_S.DEAD, _S.RESTARTING): "`rollout.max_num_restarts` allows one more; else the stage ends",
    (_S.RESTARTING, _S.STALE): "it is up",
    (_S.RESTARTING, _S.DEAD): "it ended while it started",
    (_S.STALE, _S.HEALTHY): "it confirmed the weights and their digest, and passed the probe",
}
"""All allowed transitions and their reasons; shown in `docs/guides/recover.md`."""


@dataclass
class ReplicaSlot:
    """A numbered place for a replica; its `engine` is not usable in DEAD and RESTARTING.

    Attributes:
        num_in_flight: samples that were sent to it and are not answered.
        last_answer_s: `time.monotonic` of its last sign of life while it was watched.
        num_unanswered: health checks without an answer since then.
    """

    place: int
    engine: RolloutEngine
    state: ReplicaState = field(default=ReplicaState.STALE)
    num_in_flight: int = 0
    last_answer_s: float = 0.0
    num_unanswered: int = 0

    @property
    def is_up(self) -> bool:
        """True if there is an engine to call."""
        return self.state not in (ReplicaState.DEAD, ReplicaState.RESTARTING)


@dataclass(frozen=True)
class Share(Generic[Request]):
    """Requests with distinct ids that one replica answers in one call, planned for place `home`."""

    requests: tuple[Request, ...]
    home: int

    @property
    def num_samples(self) -> int:
        """Number of samples of all requests."""
        return sum(request.num_samples for request in self.requests)


class Routing(ABC, Generic[Request]):
    """Assignment of one batch of requests to replicas; `waiting` holds what is not assigned yet."""

    waiting: list[Any]

    @abstractmethod
    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """Return (place, share) pairs to start now; `loads` counts samples in flight by place."""

    @abstractmethod
    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """Put the missing part of a lost share back into `waiting`."""


class ByPlace(Routing[Request]):
    """Request i is planned for place i mod `num_places`, running or not; one share runs per place.

    For engines whose samples depend, in the last bits, on their batch: the same replica gets the
    same share, and a lost share is sampled again whole.
    """

    def __init__(self, requests: Sequence[Request], num_places: int) -> None:
        self.waiting: list[Share[Request]] = [
            Share(tuple(requests[home::num_places]), home)
            for home in range(min(num_places, len(requests)))
        ]

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """See `Routing`. A share goes to an idle place while its own takes no requests."""
        idle = {place for place, load in loads.items() if not load}
        free = sorted(idle - {share.home for share in self.waiting})
        taken: list[tuple[int, Share[Request]]] = []
        for share in self.waiting:
            if share.home in idle:
                taken.append((share.home, share))
            elif share.home not in loads and free:
                taken.append((free.pop(0), share))
        started = {share.home for _, share in taken}
        self.waiting = [share for share in self.waiting if share.home not in started]
        return taken

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """See `Routing`. The whole share waits again, since the rest alone is another batch."""
        if ledger.missing(share.requests):
            self.waiting.append(share)


class LeastLoaded(Routing[Request]):
    """Each request goes to its session's place, else to the place with the least in flight.

    Only missing samples of a lost share are redone. The caller keeps `sessions`, the place of each
    known session, across batches.
    """

    def __init__(self, requests: Sequence[Request], sessions: MutableMapping[str, int]) -> None:
        self.waiting: list[Request] = list(requests)
        self._sessions = sessions

    def take(self, loads: Mapping[int, int]) -> list[tuple[int, Share[Request]]]:
        """See `Routing`. A session moves if its place takes no requests."""
        if not loads:
            return []
        expected = dict(loads)
        shares: dict[int, list[Request]] = {}
        for request in self.waiting:
            session = request.session
            place = None if session is None else self._sessions.get(session)
            if place is None or place not in loads:
                place = min(loads, key=lambda candidate: (expected[candidate], candidate))
                if session is not None:
                    self._sessions[session] = place
            shares.setdefault(place, []).append(request)
            expected[place] += request.num_samples
        self.waiting = []
        return [(place, Share(tuple(found), place)) for place, found in sorted(shares.items())]

    def lost(self, share: Share[Request], ledger: Ledger[Request]) -> None:
        """See `Routing`. Only missing samples wait again."""
        self.waiting += ledger.missing(share.requests)


def silence(what: str, error: BaseException) -> ReplicaLostError:
    """Return the error for a replica that did not answer; `what` is the message."""
    lost = ReplicaLostError(f"{what} ({error})" if isinstance(error, DeadlineError) else what)
    lost.__cause__ = error
    return lost


Restart = Callable[[int, RolloutEngine], Awaitable[RolloutEngine]]
"""Ends what is left of a lost replica, given its place; starts one there, without weights."""


@dataclass(frozen=True)
class RestartPolicy:
    """Rules for lost replicas: when a replica counts as lost, and how many replacements may start.

    Attributes:
        max_num_restarts: limit for all replicas together, over the life of the service.
        silence_s: a sampling replica without an answer for this long is lost.
    """

    restart: Restart
    max_num_restarts: int
    silence_s: float


class ReplicaPool:
    """All replicas of a service; `restarts` None makes the loss of a replica final."""

    def __init__(self, engines: Sequence[RolloutEngine], restarts: RestartPolicy | None) -> None:
        self.slots = tuple(ReplicaSlot(place, engine) for place, engine in enumerate(engines))
        self.num_restarts = 0
        self.failure: PipelineError | None = None
        self._restarts = restarts
        self._restarting: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []

    def in_state(self, *states: ReplicaState) -> list[ReplicaSlot]:
        """Return the slots in one of these states."""
        return [slot for slot in self.slots if slot.state in states]

    def loads(self) -> Mapping[int, int]:
        """Return the number of samples in flight at each place that takes requests."""
        return {slot.place: slot.num_in_flight for slot in self.in_state(ReplicaState.HEALTHY)}

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call the listener after each change, until the block ends."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def move(self, slot: ReplicaSlot, to: ReplicaState) -> None:
        """Change a state and notify the listeners; ValueError if not among `TRANSITIONS`."""
        if slot.state is not to:
            if (slot.state, to) not in TRANSITIONS:
                raise ValueError(f"replica {slot.place}: no step from {slot.state} to {to}")
            logger.info("replica %d: %s -> %s", slot.place, slot.state.value, to.value)
            slot.state = to
        self._tell()

    async def move_all(self, slots: Iterable[ReplicaSlot], to: ReplicaState) -> None:
        """Change the state of the slots that are up."""
        for slot in slots:
            if slot.is_up:
                self.move(slot, to)

    def lose(self, slot: ReplicaSlot, engine: RolloutEngine, error: PipelineError) -> None:
        """Restart a lost replica, or set `failure`; no-op if `engine` was replaced already."""
        if slot.engine is not engine or not slot.is_up:
            return
        logger.warning("replica %d is lost: %s", slot.place, error)
        self.move(slot, ReplicaState.DEAD)
        self._restart(slot, error)

    async def lose_all(self, lost: Iterable[tuple[ReplicaSlot, PipelineError]]) -> None:
        """Restart the replicas of some slots; see `lose`."""
        for slot, error in lost:
            self.lose(slot, slot.engine, error)

    async def ask(
        self, slots: Iterable[ReplicaSlot], call: Callable[[ReplicaSlot], Awaitable[T]]
    ) -> list[tuple[ReplicaSlot, T]]:
        """Call replicas at once and wait for all; return the answers of those that are not lost.

        Once all have answered, the first error other than a loss is raised.
        """

        async def one(slot: ReplicaSlot) -> list[tuple[ReplicaSlot, T]]:
            engine = slot.engine
            try:
                return [(slot, await call(slot))]
            except ReplicaLostError as error:
                self.lose(slot, engine, error)
                return []

        tasks = [asyncio.ensure_future(one(slot)) for slot in slots]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for task in tasks for answer in task.result()]

    async def watch(self) -> None:
        """Check the health of the replicas that sample, until cancelled; no-op without restarts."""
        if self._restarts is None:
            return
        pause_s = self._restarts.silence_s / (2 * NUM_LOOKS)
        for slot in self.slots:
            slot.last_answer_s, slot.num_unanswered = time.monotonic(), 0
        while True:
            await asyncio.sleep(pause_s)
            busy = [slot for slot in self.slots if slot.is_up and slot.num_in_flight]
            await asyncio.gather(*(self._look(slot, pause_s) for slot in busy))

    async def close(self) -> None:
        """Cancel restarts, and close every running replica; errors come as an ExceptionGroup."""
        self._restarts = None
        for task in self._restarting:
            task.cancel()
        if self._restarting:
            _, left = await asyncio.wait(self._restarting, timeout=END_DEADLINE_S)
            if left:  # the others are closed nevertheless
                logger.warning("after %g s replicas still start: %d", END_DEADLINE_S, len(left))
        results = await asyncio.gather(
            *(slot.engine.close() for slot in self.slots if slot.is_up), return_exceptions=True
        )
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise ExceptionGroup("replicas did not close", errors)

    async def _look(self, slot: ReplicaSlot, answer_s: float) -> None:
        engine, restarts = slot.engine, self._restarts
        try:
            async with asyncio.timeout(answer_s):
                await engine.health()
        except SILENCE as error:
            silent_s = time.monotonic() - slot.last_answer_s
            slot.num_unanswered += 1
            if slot.state is ReplicaState.HEALTHY:
                self.move(slot, ReplicaState.SUSPECT)
            was_asked = slot.num_unanswered >= NUM_LOOKS  # time passes for a stopped process too
            if restarts is not None and was_asked and silent_s > restarts.silence_s:
                what = f"replica {slot.place}: no answer for {silent_s:.0f} s"
                self.lose(slot, engine, silence(what, error))
        except ReplicaLostError as error:
            self.lose(slot, engine, error)
        else:
            slot.last_answer_s, slot.num_unanswered = time.monotonic(), 0
            if slot.state is ReplicaState.SUSPECT:
                self.move(slot, ReplicaState.HEALTHY)

    def _restart(self, slot: ReplicaSlot, error: PipelineError) -> None:
        restarts = self._restarts
        if restarts is None or self.num_restarts >= restarts.max_num_restarts:
            if restarts is not None:
                error.add_note(
                    f"rollout.max_num_restarts: {restarts.max_num_restarts} are used up; look at "
                    "the log of the replica, or raise it"
                )
            self.failure = error
            self._tell()
            return
        self.num_restarts += 1
        self.move(slot, ReplicaState.RESTARTING)
        task = asyncio.get_running_loop().create_task(self._start(slot, restarts.restart))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _start(self, slot: ReplicaSlot, restart: Restart) -> None:
        try:
            engine = await restart(slot.place, slot.engine)
        except PipelineError as error:
            self.move(slot, ReplicaState.DEAD)
            self._restart(slot, error)
        else:
            slot.engine, slot.num_in_flight = engine, 0
            self.move(slot, ReplicaState.STALE)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
