"""Replicas by place: what closes although something does not end."""

import asyncio
import time
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from engines.errors import ReplicaLostError
from engines.rollout import replica_pool
from engines.rollout.base import RolloutEngine
from engines.rollout.replica_pool import ReplicaPool, ReplicaState, RestartPolicy


class Stubborn:
    """A restart that goes on although it was cancelled."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def restart(self, place: int, lost: RolloutEngine) -> RolloutEngine:
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        return lost


def test_endless_restart_does_not_block_closing_other_replicas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lose_one_and_close() -> list[Any]:
        engines = [cast(RolloutEngine, AsyncMock()) for _ in range(2)]
        stubborn = Stubborn()
        pool = ReplicaPool(engines, RestartPolicy(stubborn.restart, 1, silence_s=60.0))
        pool.lose(pool.slots[0], engines[0], ReplicaLostError("replica 0: its process died"))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await pool.close()
        stubborn.may_end.set()
        return [cast(AsyncMock, engine).close.await_count for engine in engines]

    monkeypatch.setattr(replica_pool, "END_DEADLINE_S", 0.05)
    assert asyncio.run(lose_one_and_close()) == [0, 1]
    assert "after 0.05 s replicas still start: 1" in caplog.text


def test_a_watcher_that_stood_still_loses_no_replica() -> None:
    """The silence of the replicas is then its own: they could not be asked."""

    async def stand_still_and_look() -> list[ReplicaState]:
        engine = AsyncMock()
        restart = AsyncMock(return_value=engine)
        pool = ReplicaPool([engine], RestartPolicy(restart, 1, silence_s=0.3))
        [slot] = pool.slots
        slot.state, slot.num_in_flight = ReplicaState.HEALTHY, 1

        async def stands_still_at_first() -> None:
            engine.health.side_effect = None
            time.sleep(0.6)  # noqa: ASYNC251 - the whole process stands still
            await asyncio.sleep(0.5)

        engine.health.side_effect = stands_still_at_first
        watching = asyncio.ensure_future(pool.watch())
        async with asyncio.timeout(60):
            while engine.health.await_count < 3:
                await asyncio.sleep(0.01)
        watching.cancel()
        assert restart.await_count == pool.num_restarts == 0
        return [slot.state]

    assert asyncio.run(stand_still_and_look()) == [ReplicaState.HEALTHY]
