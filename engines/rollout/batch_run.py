"""Runs one batch of requests on the replicas.

Promises: every answer exactly once, also when replicas are lost. Samples that are unfinished at the
deadline are returned as `abort` with the tokens they have.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Generic

from engines.errors import ReplicaLostError
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import Ledger, Request, SampleLedger
from engines.rollout.replica_pool import ReplicaPool
from engines.rollout.replica_state import ReplicaSlot
from engines.rollout.routing import Routing, Share
from engines.types import RolloutRequest
from infra.errors import DeadlineError

ABORT_DEADLINE_S = 30.0
"""A replica that has not ended its samples this long after an abort counts as lost."""


class BatchRun(Generic[Request]):
    """Distributes a batch over the replicas and redoes lost shares; the caller sets a deadline."""

    def __init__(
        self, pool: ReplicaPool, routing: Routing[Request], ledger: Ledger[Request]
    ) -> None:
        self._pool, self._routing, self._ledger = pool, routing, ledger
        self._running: dict[
            asyncio.Task[None], tuple[ReplicaSlot, RolloutEngine, Share[Request]]
        ] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Fill the ledger.

        Raises:
            RolloutError: a refused request, a lost or doubled answer, or a replica lost for good.
        """
        watching = asyncio.get_running_loop().create_task(self._pool.watch())
        try:
            with self._pool.listening(self._changed.set):
                await self._fill()
        finally:
            await _end([watching, *self._running])
            for task in list(self._running):
                self._forget(task)

    async def _fill(self) -> None:
        await self._all()

    async def _all(self) -> None:
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

    def _start(self, slot: ReplicaSlot, share: Share[Request]) -> None:
        slot.num_in_flight += share.num_samples
        answering = self._ledger.collect_share(slot.engine, share.requests)
        task = asyncio.get_running_loop().create_task(answering)
        task.add_done_callback(lambda _: self._changed.set())
        self._running[task] = (slot, slot.engine, share)

    def _settle(self, task: "asyncio.Task[None]") -> None:
        slot, engine, share = self._forget(task)
        if not task.cancelled():
            error = task.exception()
            if error is None:
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


class SampleRun(BatchRun[RolloutRequest]):
    """A batch run of samples that are aborted after `timeout_s`."""

    def __init__(
        self,
        pool: ReplicaPool,
        routing: Routing[RolloutRequest],
        ledger: SampleLedger,
        timeout_s: float,
    ) -> None:
        super().__init__(pool, routing, ledger)
        self._samples, self._timeout_s = ledger, timeout_s

    async def run(self) -> None:
        """See the base class; a DeadlineError if not one sample was finished at the deadline."""
        await super().run()

    async def _fill(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._all()
        except TimeoutError:
            await self._abort()

    async def _abort(self) -> None:
        """End the running shares; a replica that does not end them by the deadline is lost."""
        running = dict(self._running)
        aborts = [_quietly(engine.abort()) for _, engine, _ in running.values()]
        if running:
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
        self._samples.abort_missing()
        if not self._samples.num_completed:
            raise DeadlineError("one sample to be finished (rollout.timeout_s)", self._timeout_s)


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    """Ignore the loss of the replica: the share that runs there reports the same error."""
    try:
        await call
    except ReplicaLostError:
        return


async def _end(tasks: Iterable["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
