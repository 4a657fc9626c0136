"""Starts and restarts rollout engines in Ray actors.

Promises: replicas that are started together all run, or none is left; a replacement is built
like the replica that it replaces, after that one was killed.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from engines.controller.pool import Place, this_node
from engines.controller.replica import RemoteReplica, ReplicaProcess, ReplicaSpec
from engines.driver_disk import access_for
from engines.errors import ReplicaLostError
from engines.rollout.base import RolloutEngine
from engines.rollout.event_loop import EventLoopThread
from infra.errors import DeadlineError

START_DEADLINE_S = 600.0
"""Deadline of one start; an engine that compiles or loads kernels takes minutes."""

logger = logging.getLogger(__name__)


class RayReplicas:
    """A `ReplicaStarter` on the connected cluster, with one place per replica."""

    def __init__(self, spec: ReplicaSpec, places: Sequence[Place]) -> None:
        self._spec = spec
        self._places = tuple(places)
        nodes = [place.node for place in places]
        self._access = access_for(nodes, this_node(), spec.log_dir)

    def start(self) -> list[RemoteReplica]:
        """Start a replica in every place and wait until all engines are built, without weights.

        If one dies, is too slow or refuses its model, all are ended and its error is raised.
        """
        replicas = [self._create(place) for place in range(len(self._places))]

        async def build() -> None:
            await asyncio.gather(*(self._build(replica) for replica in replicas))

        loop = EventLoopThread("replica-start")
        try:
            loop.run(build(), f"{len(replicas)} replicas to start", 2 * START_DEADLINE_S)
        except BaseException:
            for replica in replicas:
                replica.kill()
            raise
        finally:
            loop.close()
        return replicas

    async def restart(self, place: int, lost: RolloutEngine) -> RemoteReplica:
        """Kill a lost replica and start another in its place."""
        cast(RemoteReplica, lost).kill()
        replica = self._create(place)
        try:
            await self._build(replica)
        except BaseException:
            replica.kill()
            raise
        logger.info("replica %d is up again", place)
        return replica

    def _create(self, place: int) -> RemoteReplica:
        import ray

        spec = self._spec
        remote: Any = ray.remote(max_restarts=0, max_task_retries=0)(ReplicaProcess)
        runtime: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": str(spec.num_threads)}}
        if spec.interpreter is not None:
            runtime["py_executable"] = str(spec.interpreter)
        options = self._places[place].options
        actor = remote.options(runtime_env=runtime, **options).remote(place, spec, self._access)
        num_workers = spec.rollout.num_workers_per_replica
        return RemoteReplica(actor, place, spec.log_path(place), num_workers)

    async def _build(self, replica: RemoteReplica) -> None:
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await replica.build()
        except TimeoutError:
            raise DeadlineError("a replica to start", START_DEADLINE_S) from None
        except RayError as error:
            raise ReplicaLostError(f"a replica did not start: {error}") from error
