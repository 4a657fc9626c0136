"""Starts the worker group of a policy and its rollout engines, in this process or as Ray actors.

Promises: everything that a run starts outside its process is reserved at once, before any of it
starts. Ray is imported only if other processes are needed. A platform is detected only in processes
that compute on it. Errors while starting: `ConfigError` (an engine cannot serve its
model, dtype or options), `WorkerError` or `ReplicaLostError` (a process died), `DeadlineError` (no
room in the cluster, or a process was too slow).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engines.config.model import adapter_travels
from engines.config.plugins import ROLLOUT_ENGINES, is_embedded
from engines.config.rollout import RolloutConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.placement import NO_NEWS, Options, Place, Pool, Queueing, reserve, this_node
from engines.controller.ray_group import RayGroupOptions, RayWorkerGroup
from engines.controller.replica import RayReplicas, ReplicaSpec
from engines.controller.rollout import (
    LaunchedEngines,
    RankRollout,
    Rollout,
    Sender,
    ServedRollout,
    choose_transport,
)
from engines.controller.worker_group import InProcessGroup, WorkerGroup
from engines.rollout.base import behind_service, create_rollout_engine
from engines.rollout.replica_pool import RestartPolicy
from engines.weight_sync.in_process import new_transport
from hardware.detection import detect, planned
from infra import env
from infra.job_environments import installed_distributions, is_inside
from infra.waiting import in_thread, result_within

RAY_ADDRESS = "auto"
CONNECT_DEADLINE_S = 60.0
MARGIN_S = 120.0
"""Time that the group waits for a rank's error, after the rank's own timeout."""


def launch_policy_beside(
    spec: WorkerSpec,
    others: Mapping[str, ReplicaSpec],
    log_dir: Path,
    queueing: Queueing = NO_NEWS,
) -> tuple[WorkerGroup, Rollout, dict[str, LaunchedEngines]]:
    """Start the ranks of a policy, its rollout engines, and engines of other models.

    The caller closes all of them, the ranks last: the reservation is released with the group. The
    engines of `others` (judge, teacher) get no weights, and are embedded only if the policy's are.
    """
    if spec.rollout is None:
        raise ValueError("a policy without a rollout is started by launch_policy_group")
    here, replica = trains_here(spec), policy_replica(spec, spec.rollout, log_dir)
    trained = replace(spec, rollout=None)
    if is_embedded(spec.rollout) and here:
        engines = launch_engines(replica)  # first, because it may raise
        beside = {name: launch_engines(other) for name, other in others.items()}
        workers: WorkerGroup = _group_here(trained, None)
        return workers, ServedRollout(engines, workers), beside
    connect_ray()
    num_ranks, num_replicas = spec.training.num_workers, spec.rollout.num_replicas
    bundles = _rank_bundles(spec.platform, num_ranks)
    first, num_actors_on_device = num_ranks, 1
    if is_embedded(spec.rollout):
        num_replicas = 0
    elif replica.shares_devices:
        # One replica on the devices of each rank, in the rank's place.
        bundles, first, num_replicas = [], 0, num_ranks
        num_actors_on_device = 1 if here else 2
    bundles += _replica_bundles(replica, num_replicas)
    num_own = len(bundles)
    # All in one reservation: two runs that each hold half of the devices would wait forever.
    for other in others.values():
        bundles += _replica_bundles(other, other.rollout.num_replicas)
    sharing = [num_actors_on_device] * num_own
    with reserve(bundles, queueing, 0 if here else None, sharing).closed_on_error() as pool:
        beside = dict(zip(others, _launch_each(others.values(), pool, num_own), strict=True))
        if not num_replicas:
            workers = _group_of_actors(spec, log_dir, pool)
            return workers, RankRollout(workers), beside
        nodes = tuple(place.node for place in pool.places(0, num_ranks))
        sender = Sender(nodes, has_device=not here)
        # First, because it may raise.
        engines = launch_engines(replica, pool.places(first, num_replicas), sender)
        workers = _group_here(trained, pool) if here else _group_of_actors(trained, log_dir, pool)
        return workers, ServedRollout(engines, workers), beside


def launch_policy_group(
    spec: WorkerSpec, log_dir: Path, queueing: Queueing = NO_NEWS
) -> WorkerGroup:
    """Start and initialize the ranks of a policy; Ray ranks log to `log_dir`."""
    if trains_here(spec):
        return _group_here(spec, None)
    connect_ray()
    bundles = _rank_bundles(spec.platform, spec.training.num_workers)
    return _group_of_actors(spec, log_dir, reserve(bundles, queueing))


@dataclass(frozen=True)
class LaunchedModel:
    """A served frozen model and the models that score its answers; `pool` is closed last."""

    engines: LaunchedEngines
    beside: WorkerGroup | None
    judge: LaunchedEngines | None
    pool: Pool


def launch_served_model(
    spec: ReplicaSpec,
    beside: WorkerSpec | None = None,
    judge: ReplicaSpec | None = None,
    queueing: Queueing = NO_NEWS,
) -> LaunchedModel:
    """Start engines of a frozen model and the models that score its answers.

    `beside` is one more model on one rank, such as a reward model. The engines of `judge` are
    embedded if and only if those of `spec` are.
    """
    if is_embedded(spec.rollout):
        engines = launch_engines(spec)
        group = None if beside is None else _group_here(beside, None)
        return LaunchedModel(engines, group, judge and launch_engines(judge), Pool(None, ()))
    replicas = [spec] if judge is None else [spec, judge]
    num_ranks = int(beside is not None)
    with reserve_replicas(replicas, queueing, num_ranks).closed_on_error() as pool:
        engines, *judges = _launch_each(replicas, pool, num_ranks)
        group = None if beside is None else _group_of_actors(beside, spec.log_dir, pool)
        return LaunchedModel(engines, group, judges[0] if judges else None, pool)


def reserve_replicas(
    replicas: Sequence[ReplicaSpec], queueing: Queueing = NO_NEWS, num_ranks: int = 0
) -> Pool:
    """Reserve places for `num_ranks` ranks, then for all replicas; the caller closes the pool.

    No replica may be embedded: embedded engines need no place.
    """
    connect_ray()
    bundles = _rank_bundles(replicas[0].platform, num_ranks)
    for each in replicas:
        bundles += _replica_bundles(each, each.rollout.num_replicas)
    return reserve(bundles, queueing)


def _rank_bundles(platform: str, num_ranks: int) -> list[Options]:
    return [planned(platform).ray_resource_options(1)] * num_ranks


def _replica_bundles(replica: ReplicaSpec, num_replicas: int) -> list[Options]:
    num_devices = replica.rollout.num_workers_per_replica
    return [planned(replica.platform).ray_resource_options(num_devices)] * num_replicas


def _launch_each(replicas: Iterable[ReplicaSpec], pool: Pool, first: int) -> list[LaunchedEngines]:
    """Start engines of several models in the places of a pool from `first` on."""
    launched: list[LaunchedEngines] = []
    for replica in replicas:
        num_replicas = replica.rollout.num_replicas
        launched.append(launch_engines(replica, pool.places(first, num_replicas)))
        first += num_replicas
    return launched


def trains_here(spec: WorkerSpec) -> bool:
    """True if the policy trains in the caller's process.

    This needs a single rank. Beside replicas it also needs a device that Ray does not assign: only
    an actor's device can be reserved together with those of the replicas.
    """
    if spec.training.num_workers > 1:
        return False
    beside = spec.rollout is not None and not is_embedded(spec.rollout)
    return not (beside and planned(spec.platform).is_assigned_by_ray)


def policy_replica(spec: WorkerSpec, rollout: RolloutConfig, log_dir: Path) -> ReplicaSpec:
    """Return the spec of an engine that serves the policy; it logs to `log_dir`."""
    training = spec.training
    return ReplicaSpec(
        serving_dir=spec.serving_dir,
        rollout=rollout,
        dtype=rollout.dtype or training.dtype,
        platform=spec.platform,
        device_kind=spec.device_kind,
        num_threads=training.num_threads,
        log_dir=log_dir,
        shares_devices=rollout.placement == "colocated",
        adapter=training.lora if adapter_travels(training, rollout) else None,
    )


def launch_engines(
    spec: ReplicaSpec, places: Sequence[Place] = (), sender: Sender | None = None
) -> LaunchedEngines:
    """Start rollout engines without weights: one in this process, or replicas in `places`.

    `sender` has the weights; None means this process.
    """
    rollout = spec.rollout
    if is_embedded(rollout):
        platform, _ = detect(spec.platform)
        engine = create_rollout_engine(
            rollout.engine, spec.serving_dir, behind_service(rollout), spec.dtype, platform
        )
        return LaunchedEngines(
            [engine],
            rollout.timeout_s,
            new_transport(spec.serving_dir, spec.dtype, rollout.timeout_s, platform.device_name),
            spec.shares_devices,
        )
    sender = sender or Sender((this_node(),), has_device=False)
    interpreter = ROLLOUT_ENGINES.interpreter(rollout.engine, ROLLOUT_ENGINES.setting)
    if interpreter is not None:
        libraries = installed_distributions(interpreter)
        spec = replace(spec, interpreter=interpreter, libraries=libraries)
    transport = choose_transport(spec, places, sender)
    of_adapter = choose_transport(spec, places, sender, adapter=True) if spec.adapter else None
    starter = RayReplicas(spec, places)
    return LaunchedEngines(
        starter.start(),
        rollout.timeout_s,
        transport,
        spec.shares_devices,
        of_adapter,
        ROLLOUT_ENGINES.find(rollout.engine).routing,
        RestartPolicy(starter.restart, rollout.max_num_restarts, rollout.silence_s),
    )


def _group_here(spec: WorkerSpec, pool: Pool | None) -> WorkerGroup:
    worker = ModelWorker(spec)
    worker.initialize()
    return InProcessGroup(worker, pool)


def _group_of_actors(spec: WorkerSpec, log_dir: Path, pool: Pool) -> WorkerGroup:
    training, platform = spec.training, planned(spec.platform)
    options = RayGroupOptions(
        world_size=training.num_workers,
        backend=platform.process_group_backend,
        num_threads=training.num_threads,
        log_dir=log_dir,
        sees_all_devices=platform.shows_all_devices,
        collective_timeout_s=training.collective_timeout_s,
        env_vars=env.unset_of(platform.training_env_vars(training.backend)),
        timeouts_s={"generate": spec.rollout.timeout_s + MARGIN_S} if spec.rollout else {},
    )
    return RayWorkerGroup(partial(ModelWorker, spec), options, pool)


def connect_ray() -> None:
    """Connect to the Ray cluster; raise DeadlineError if it does not answer in time."""
    import ray

    def connect() -> None:
        ray.init(
            address=RAY_ADDRESS,
            log_to_driver=False,
            configure_logging=False,
            # By default Ray starts actors with the Python of the cluster.
            runtime_env={"py_executable": sys.executable} if is_inside() else None,
        )

    if not ray.is_initialized():
        # In a thread: ray.init retries forever, and would replace our SIGTERM handler.
        connected = in_thread(connect, "ray-connect")
        result_within(connected, "the Ray cluster of this job to answer", CONNECT_DEADLINE_S)
