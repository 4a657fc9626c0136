"""The replicas of a service: which can serve, which are lost, and their restarts.

Promises: a replica that dies, or stays silent while it samples, is ended and restarted, within the
allowed number of restarts. Everything runs in the event loop of the service.
Does not promise: weights. A new replica is STALE until the service gives it some.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from engines.errors import ReplicaLostError
from engines.rollout.base import RolloutEngine
from engines.rollout.replica_state import ReplicaSlot, ReplicaState
from infra.errors import DeadlineError, PipelineError

NUM_LOOKS = 6
"""Health checks within `silence_s`, after which a silent replica counts as lost."""
END_DEADLINE_S = 10.0
"""Time for a cancelled restart to end."""
SILENCE = (TimeoutError, DeadlineError)
"""A deadline passed without an answer: the caller's, or the engine's own."""

logger = logging.getLogger(__name__)


def silence(what: str, error: BaseException) -> ReplicaLostError:
    """Return the error for a replica that did not answer; `what` is the message."""
    lost = ReplicaLostError(f"{what} ({error})" if isinstance(error, DeadlineError) else what)
    lost.__cause__ = error
    return lost


class ReplicaStarter(Protocol):
    """Starts a replica in the place of a lost one."""

    async def restart(self, place: int, lost: RolloutEngine) -> RolloutEngine:
        """End what is left of a replica; start one without weights, or raise a PipelineError."""
        ...


@dataclass(frozen=True)
class RestartPolicy:
    """When a replica is given up, and how often another one may start.

    Attributes:
        max_num_restarts: of all replicas together, over the life of the service.
        silence_s: a sampling replica without an answer for this long is lost.
    """

    starter: ReplicaStarter
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
        """Return the samples in flight at each place that takes requests."""
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
        """Change a state and notify the listeners."""
        if slot.state is not to:
            logger.info("replica %d: %s -> %s", slot.place, slot.state.value, to.value)
        slot.move(to)
        self._tell()

    def lose(self, slot: ReplicaSlot, engine: RolloutEngine, error: PipelineError) -> None:
        """Restart a lost replica, or set `failure`; no-op if `engine` was replaced already."""
        if slot.engine is not engine or not slot.is_up:
            return
        logger.warning("replica %d is lost: %s", slot.place, error)
        self.move(slot, ReplicaState.DEAD)
        self._restart(slot, error)

    async def watch(self) -> None:
        """Check the health of the replicas that sample, until cancelled."""
        if self._restarts is None:
            return
        pause_s = self._restarts.silence_s / NUM_LOOKS
        for slot in self.slots:
            slot.last_answer_s = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            busy = [slot for slot in self.slots if slot.is_up and slot.num_in_flight]
            await asyncio.gather(*(self._look(slot, pause_s) for slot in busy))

    async def close(self, close: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        """Cancel restarts, and close every running replica; errors come as an ExceptionGroup."""
        self._restarts = None
        for task in self._restarting:
            task.cancel()
        if self._restarting:
            _, left = await asyncio.wait(self._restarting, timeout=END_DEADLINE_S)
            if left:  # the others are closed nevertheless
                logger.warning("after %g s replicas still start: %d", END_DEADLINE_S, len(left))
        up = [slot.engine for slot in self.slots if slot.is_up]
        results = await asyncio.gather(*(close(one) for one in up), return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            raise ExceptionGroup("replicas did not close", errors)

    async def _look(self, slot: ReplicaSlot, answer_s: float) -> None:
        engine, restarts = slot.engine, self._restarts
        try:
            async with asyncio.timeout(answer_s):
                await engine.health()
        except SILENCE as error:
            silent_s = time.monotonic() - slot.last_answer_s
            if slot.state is ReplicaState.HEALTHY:
                self.move(slot, ReplicaState.SUSPECT)
            if restarts is not None and silent_s > restarts.silence_s:
                lost = f"replica {slot.place}: no answer for {silent_s:.0f} s"
                self.lose(slot, engine, silence(lost, error))
        except ReplicaLostError as error:
            self.lose(slot, engine, error)
        else:
            slot.last_answer_s = time.monotonic()
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
        task = asyncio.get_running_loop().create_task(self._start(slot, restarts.starter))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _start(self, slot: ReplicaSlot, starter: ReplicaStarter) -> None:
        try:
            engine = await starter.restart(slot.place, slot.engine)
        except PipelineError as error:
            self.move(slot, ReplicaState.DEAD)
            self._restart(slot, error)
            return
        slot.engine, slot.num_in_flight = engine, 0
        self.move(slot, ReplicaState.STALE)

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
