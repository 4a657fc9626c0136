"""A rollout engine in its own Ray actor, the driver's handle of it, and how both are started.

Promises: `RemoteReplica` fulfils the engine's interface wherever it runs; each `PipelineError`
arrives as it was raised; a dead replica is a `ReplicaLostError` with the last lines of its log.
Replicas that are started together all run, or none is left; a replacement is built like the replica
that it replaces, after that one was killed.
Does not set deadlines of calls, except of `build` and `close`: the caller does.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from engines import remote_files
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.controller.placement import Place, this_node, use_interface_of
from engines.controller.process_log import log_tail, log_to
from engines.errors import ReplicaLostError
from engines.remote_files import DiskAccess, access_for
from engines.rollout.base import (
    ALL_MEMORY,
    Health,
    MemoryTag,
    RolloutEngine,
    SleepLevel,
    behind_service,
    create_rollout_engine,
    wake,
)
from engines.rollout.event_loop import EventLoopThread
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.rollout.replica_pool import SILENCE
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import WeightDigest, WeightSource
from hardware.detection import check_planned, detect
from infra.errors import ConfigError, DeadlineError, PipelineError, on_failure
from infra.host.processes import ProcessIdentity, is_alive, own_identity
from infra.identity.fingerprint import refuse_other_libraries
from infra.plugins import import_external_modules

if TYPE_CHECKING:
    from engines.rollout.openai_endpoint import Endpoint

T = TypeVar("T")
NO_VERSION = -1

START_DEADLINE_S = 600.0
"""Deadline of one start; an engine that compiles or loads kernels takes minutes."""
CLOSE_DEADLINE_S = 30.0
LOG_EVERY_S = 2.0
"""How often a replica on another disk sends its log to the driver."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSpec:
    """Engine that a replica builds, and its environment; picklable.

    Attributes:
        serving_dir: Hugging Face directory with the engine's configuration.
        interpreter: path of the Python that runs the engine; None: the starting process's own.
        libraries: required versions by distribution in that environment.
        shares_devices: shares devices with training ranks and sleeps until it gets weights.
        adapter: shape of the adapter, if syncs send it without the base weights; else None.
    """

    serving_dir: Path
    rollout: RolloutConfig
    dtype: str
    platform: str
    device_kind: str | None
    num_threads: int
    log_dir: Path
    interpreter: Path | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    shares_devices: bool = False
    adapter: LoraConfig | None = None

    def log_path(self, number: int) -> Path:
        """Return the log file of a replica."""
        return self.log_dir / f"replica-{number}.log"


@dataclass(frozen=True)
class ReplicaLocation:
    """Ray node and process of a replica."""

    node_id: str
    process: ProcessIdentity


def end_process(process: ProcessIdentity) -> None:
    """Kill a process of this machine, even a stopped one, which cannot react to Ray."""
    if is_alive(process):
        os.kill(process.pid, signal.SIGKILL)


class ReplicaProcess:
    """Class of the Ray actor; its methods run concurrently in one event loop."""

    def __init__(
        self, number: int, spec: ReplicaSpec, address: str, access: DiskAccess | None = None
    ) -> None:
        self._spec, self._number, self._address = spec, number, address
        self._disk = remote_files.use(access)
        self._engine: RolloutEngine
        self._endpoint: Endpoint | None = None
        log_to(self._disk.local(spec.log_path(number)))
        self._disk.follow(spec.log_path(number), LOG_EVERY_S)

    async def build(self) -> ReplicaLocation:
        """Make the engine; not in the constructor, whose errors Ray reports as an actor's death."""
        serving_dir = await asyncio.to_thread(self._disk.bring, self._spec.serving_dir)
        spec = replace(self._spec, serving_dir=serving_dir)
        if spec.interpreter is not None:
            refuse_other_libraries(
                spec.libraries, Path(sys.executable), f"a replica of {spec.rollout.engine}"
            )
        for broken in import_external_modules():
            logger.warning("%s", broken)
        # Before the engine starts processes, which join communicators with the ranks.
        logger.info("collectives over %s", use_interface_of(self._address))
        torch.set_num_threads(spec.num_threads)
        platform, _ = detect(spec.platform)
        check_planned(platform, spec.platform, spec.device_kind)
        self._engine = create_rollout_engine(
            spec.rollout.engine,
            spec.serving_dir,
            behind_service(spec.rollout),
            spec.dtype,
            platform,
            spec.adapter,
        )
        if spec.shares_devices:
            await self._engine.sleep()
        if spec.rollout.openai_endpoint:
            try:
                from engines.rollout.openai_endpoint import serve
            except ModuleNotFoundError as error:
                raise ConfigError(
                    "rollout.openai_endpoint",
                    f"got true; need {error.name} in the environment of {spec.rollout.engine}; "
                    "install it there",
                ) from error
            path = self._disk.local(spec.log_path(self._number).with_suffix(".openai.json"))
            self._endpoint = await serve(
                self._engine, spec.serving_dir, spec.rollout.timeout_s, path
            )
            logger.info("OpenAI's API: address and key are in %s", path)
        return ReplicaLocation(this_node(), own_identity())

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """Stream the engine's completions."""
        async for completion in self._engine.generate(requests):
            yield completion

    async def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call an engine method other than `generate`; through the endpoint if there is one."""
        if self._endpoint is not None:
            return await self._endpoint.call(name, arguments)
        if name == "wake_up":
            return await wake(self._engine, *arguments)
        return await getattr(self._engine, name)(*arguments)


class RemoteReplica(RolloutEngine):
    """The driver's handle of a `ReplicaProcess`; `num_workers` processes share its model."""

    def __init__(self, actor: Any, number: int, log_path: Path, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self._actor = actor
        self._number = number
        self._log_path = log_path
        self._version = NO_VERSION
        self._location: ReplicaLocation | None = None

    @property
    def version(self) -> int:
        """Version that this handle last confirmed; -1 while the engine has no confirmed weights."""
        return self._version

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[Completion]:
        """See the base class."""
        method = self._actor.generate.options(num_returns="streaming")
        async for reference in method.remote(requests):
            yield await self._answer(reference)

    async def update_weights(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class."""
        self._version = NO_VERSION
        return await self._call("update_weights", source, version)

    async def update_adapter(self, source: WeightSource, version: int) -> WeightDigest:
        """See the base class."""
        self._version = NO_VERSION
        return await self._call("update_adapter", source, version)

    async def finish_update(self, version: int, digest: str) -> None:
        """See the base class."""
        await self._call("finish_update", version, digest)
        self._version = version

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """See the base class."""
        return await self._call("score", sequences, temperature)

    async def prompt_logprobs(self, requests: Sequence[PromptRequest]) -> list[PromptLogprobs]:
        """See the base class."""
        return await self._call("prompt_logprobs", requests)

    async def pause(self) -> None:
        """See the base class."""
        await self._call("pause")

    async def resume(self) -> None:
        """See the base class."""
        await self._call("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See the base class."""
        await self._call("abort", request_ids)

    async def sleep(self, level: SleepLevel = "weights") -> None:
        """See the base class."""
        await self._call("sleep", level)
        if level == "weights":
            self._version = NO_VERSION

    async def wake_up(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """See the base class."""
        await self._call("wake_up", tags)

    async def health(self) -> Health:
        """See the base class."""
        return await self._call("health")

    async def close(self) -> None:
        """Close the engine and end its process."""
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._call("close")
        except (ReplicaLostError, *SILENCE) as error:
            logger.warning("a replica did not close by itself: %r", error)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process, after `build` even a stopped one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.kill(self._actor)
        location = self._location
        if location is not None and location.node_id == this_node():
            end_process(location.process)
        elif location is not None:
            there = NodeAffinitySchedulingStrategy(location.node_id, soft=False)
            task: Any = ray.remote(num_cpus=0)(end_process)
            task.options(scheduling_strategy=there).remote(location.process)

    async def build(self) -> None:
        """Make the engine in its process; raise its error, or why the process did not start."""
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(START_DEADLINE_S):
                self._location = await self._answer(self._actor.build.remote())
        except TimeoutError:
            raise DeadlineError("a replica to start", START_DEADLINE_S) from None
        except RayError as error:
            raise ReplicaLostError(f"a replica did not start: {error}") from error

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._answer(self._actor.call.remote(name, arguments))

    async def _answer(self, reference: Awaitable[T]) -> T:
        """Await an answer; unwrap a `PipelineError`; a death becomes a `ReplicaLostError`."""
        from ray.exceptions import RayActorError, RayTaskError

        who = f"replica {self._number}"
        try:
            return await reference
        except RayActorError as error:
            raise ReplicaLostError(
                f"{who}: its process died{log_tail(self._log_path, who)}"
            ) from error
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, PipelineError):
                raise
            cause.add_note(f"raised in {who}")
            raise cause from None


class RayReplicas:
    """Starts and restarts replicas as Ray actors, one per place."""

    def __init__(self, spec: ReplicaSpec, places: Sequence[Place]) -> None:
        self._spec = spec
        self._places = tuple(places)
        self._access = access_for([place.node for place in places], this_node(), spec.log_dir)

    def start(self) -> list[RemoteReplica]:
        """Start a replica in every place and wait until all engines are built, without weights.

        If one dies, is too slow or refuses its model, all are ended and its error is raised.
        """
        replicas = [self._create(place) for place in range(len(self._places))]

        async def build() -> None:
            await asyncio.gather(*(replica.build() for replica in replicas))

        with closing(EventLoopThread("replica-start")) as loop, ExitStack() as undo:
            for replica in replicas:
                undo.callback(replica.kill)
            loop.run(build(), f"{len(replicas)} replicas to start", 2 * START_DEADLINE_S)
            undo.pop_all()
        return replicas

    async def restart(self, place: int, lost: RolloutEngine) -> RemoteReplica:
        """Kill a lost replica and start another in its place."""
        cast(RemoteReplica, lost).kill()
        replica = self._create(place)
        with on_failure(lambda _: replica.kill()):
            await replica.build()
        logger.info("replica %d is up again", place)
        return replica

    def _create(self, place: int) -> RemoteReplica:
        import ray

        spec = self._spec
        remote: Any = ray.remote(max_restarts=0, max_task_retries=0)(ReplicaProcess)
        runtime: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": str(spec.num_threads)}}
        if spec.interpreter is not None:
            runtime["py_executable"] = str(spec.interpreter)
        there = self._places[place]
        actor = remote.options(runtime_env=runtime, **there.options)
        return RemoteReplica(
            actor.remote(place, spec, there.address, self._access),
            place,
            spec.log_path(place),
            spec.rollout.num_workers_per_replica,
        )
