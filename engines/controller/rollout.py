"""The rollout engines that a trainer calls, and the choice of the transport of its weights.

Promises: equal requests and weights give equal samples, whether the engine is inside a rank or
beside the ranks, if one engine samples all; nothing is sampled from weights that were not verified.
Knows nothing of rewards, data, or what is trained.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from engines.checkpoint.hub_names import served_float32_names
from engines.checkpoint.tensor_files import stored_tensors
from engines.collectives import open_store
from engines.config.rollout import RoutingName
from engines.controller.model_worker import ModelWorker
from engines.controller.placement import Place, this_address
from engines.controller.replica import ReplicaSpec
from engines.controller.worker_group import InProcessGroup, WorkerGroup
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import Receive
from engines.rollout.publishing import NewTransport, Probe, WeightRoute
from engines.rollout.replica_pool import RestartPolicy
from engines.rollout.service import RolloutService
from engines.types import Completion, RolloutRequest
from engines.weight_sync import device_ipc, shared_memory
from engines.weight_sync.base import SyncReport
from engines.weight_sync.collective import CollectiveTransport
from engines.weight_sync.sharded import ShardedTransport
from engines.weight_sync.shared_memory import SharedMemoryTransport
from hardware.detection import planned
from infra.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sender:
    """The Ray node of each rank with the weights; `has_device` if they are on the platform's."""

    nodes: tuple[str, ...]
    has_device: bool


def choose_transport(
    spec: ReplicaSpec, places: Sequence[Place], sender: Sender, *, adapter: bool = False
) -> NewTransport:
    """Return a factory of the weight transport to replicas. Ray must be connected.

    `auto` takes the first that is possible: device IPC if the weights are on an accelerator that
    has it, shared memory, a communicator. The first two need a rank on the node of each replica;
    the lowest rank there sends. An `adapter` is small and goes over the CPU. Device IPC becomes
    shared memory for an adapter, and for a sender without a device.

    Raises:
        ConfigError: the requested transport does not reach a replica, the platform has no device
            IPC, or a communicator would join two versions of torch.
    """
    rollout = spec.rollout
    names = served_float32_names(spec.serving_dir, getattr(torch, spec.dtype))
    elsewhere = sorted({place.address for place in places if place.node not in sender.nodes})
    if rollout.transport in {"shared_memory", "device_ipc"} and elsewhere:
        raise ConfigError(
            "rollout.transport",
            f"got {rollout.transport}, and replicas on {', '.join(elsewhere)}; need a rank with "
            "the weights on the node of each; choose auto",
        )
    if not elsewhere and rollout.transport != "collective":
        return partial(
            _open_within_nodes(spec, sender, adapter=adapter),
            spec.dtype,
            names,
            rollout.timeout_s,
            this_address(),
            senders=[sender.nodes.index(place.node) for place in places],
        )
    if elsewhere:
        logger.info("weights go by broadcast: no rank has them on %s", ", ".join(elsewhere))
    return _open_broadcast(spec, names, len(places), sender, adapter=adapter)


def _open_broadcast(
    spec: ReplicaSpec,
    float32_names: frozenset[str],
    num_replicas: int,
    sender: Sender,
    *,
    adapter: bool,
) -> NewTransport:
    """Return the factory of a transport by a communicator; raises as `choose_transport`."""
    rollout = spec.rollout
    own, theirs = torch.__version__, spec.libraries.get("torch", torch.__version__)
    if own.partition("+")[0] != theirs.partition("+")[0]:
        raise ConfigError(
            "rollout.transport",
            f"got {rollout.transport}, torch {own} in the ranks and {theirs} in the replicas; need "
            "one version for a communicator; place all replicas on nodes of ranks with the weights "
            "and choose shared_memory, or choose another rollout.engine",
        )
    # Device collectives (NCCL) cannot join two processes on one device.
    has_device = sender.has_device and not spec.shares_devices
    platform = planned(spec.platform if has_device and not adapter else "cpu")
    # The base weights under an adapter are sent only once.
    num_senders = len(sender.nodes) if spec.adapter is None else 1
    transport = CollectiveTransport if num_senders == 1 else ShardedTransport
    return partial(
        transport.open,
        spec.dtype,
        float32_names,
        rollout.timeout_s,
        this_address(),
        num_senders=num_senders,
        backend=platform.communication_backend,
        device_name=platform.device_name,
        # Of all transfers, so that they keep their communicator.
        server=open_store(num_replicas + num_senders, rollout.timeout_s, this_address()),
        delta_sync=rollout.delta_sync and spec.adapter is None,
    )


def _open_within_nodes(
    spec: ReplicaSpec, sender: Sender, *, adapter: bool
) -> Callable[..., SharedMemoryTransport]:
    """Return the function that opens a transport through the memory of devices or of hosts."""
    platform, is_chosen = planned(spec.platform), spec.rollout.transport == "device_ipc"
    if is_chosen and not platform.supports_ipc:
        raise ConfigError(
            "rollout.transport",
            f"got device_ipc, and {platform.name} devices, whose memory processes cannot share; "
            "choose auto",
        )
    if adapter or not (is_chosen or spec.rollout.transport == "auto"):
        return shared_memory.open_transport
    # On a CPU the host's memory is as fast, and its checksums are faster.
    is_useful = sender.has_device if platform.is_assigned_by_ray else is_chosen
    if is_useful and platform.supports_ipc:
        return partial(device_ipc.open_transport, platform.name)
    return shared_memory.open_transport


@dataclass(frozen=True)
class LaunchedEngines:
    """Engines without weights, and what their service needs.

    The transport factories take the number of workers of each engine; the one for adapters is None
    if no adapter is sent alone.
    """

    engines: Sequence[RolloutEngine]
    timeout_s: float
    new_transport: NewTransport
    shares_devices: bool
    new_adapter_transport: NewTransport | None = None
    routing: RoutingName = "by_place"
    restarts: RestartPolicy | None = None

    def service(self) -> RolloutService:
        """Return a service that owns the engines."""
        return RolloutService(self.engines, self.timeout_s, self.routing, self.restarts)


class ServedRollout(RolloutService):
    """Service that owns engines beside the ranks; the ranks send them weights."""

    def __init__(self, engines: LaunchedEngines, workers: WorkerGroup) -> None:
        super().__init__(engines.engines, engines.timeout_s, engines.routing, engines.restarts)
        self._launched, self._workers = engines, workers

    def publish(self, version: int, probe: Probe | None = None) -> SyncReport:
        """Serve the policy's current weights as `version`, verified by digest.

        The ranks send the weights, or the base once and then the adapter. `probe` is a check that
        each engine must pass before it serves.

        Raises:
            WeightSyncError: an engine fails the probe or holds other weights.
        """
        run, launched = self._workers.run, self._launched
        send, adapter = partial(run, ModelWorker.send_weights), None
        if launched.new_adapter_transport is not None:
            send = partial(run, ModelWorker.send_frozen_weights)
            adapter = WeightRoute(
                launched.new_adapter_transport, partial(run, ModelWorker.send_adapter)
            )
        leave: Callable[[], object] = (
            partial(run, ModelWorker.leave_device) if launched.shares_devices else lambda: None
        )
        return self.sync(launched.new_transport, send, version, probe, adapter, leave)

    def sleep(self) -> None:
        """Release device memory that the ranks need: put engines on their devices to sleep.

        Those sample nothing until the next `publish`; engines on other devices are unaffected.
        """
        if self._launched.shares_devices:
            super().sleep()


class RankRollout:
    """An engine inside each training rank; every rank samples its share.

    If the ranks are other processes, `on_completion` is called only after the last sample.
    """

    num_restarts = 0
    """Always 0: an engine is not restarted alone, since it dies with its rank."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample every request; completions are in the order of each request's seeds."""
        if isinstance(self._workers, InProcessGroup):
            return self._workers.run(ModelWorker.generate, requests, on_completion)
        rows = self._workers.run(ModelWorker.generate, requests)
        for completion in chain.from_iterable(rows):
            if on_completion is not None and completion.finish_reason != "abort":
                on_completion(completion)
        return rows

    def publish(self, version: int, probe: Probe | None = None) -> SyncReport:
        """Sync the weights inside each rank, then probe; see `ServedRollout.publish`."""
        report = self._workers.run(ModelWorker.sync_weights, version)
        if probe is not None:
            requests = [probe.request(i, version) for i in range(self._workers.world_size)]
            probe.check(requests, [row[0] for row in self.generate(requests)])
        return report

    def sleep(self) -> None:
        """Put the engines of all ranks to sleep."""
        self._workers.run(ModelWorker.sleep)

    def close(self) -> None:
        """Do nothing: the ranks close their engines."""


Rollout = RankRollout | ServedRollout


@dataclass(frozen=True)
class FrozenModel:
    """A judge or a teacher on disk, served by engines beside those of the policy."""

    replica: ReplicaSpec
    weights_dir: Path

    @contextmanager
    def served_by(self, engines: LaunchedEngines) -> Iterator[RolloutService]:
        """Yield a service over `engines`, which have the weights; they are closed at the end."""
        with closing(engines.service()) as service:
            service.sync(
                engines.new_transport, lambda to: to.send(stored_tensors(self.weights_dir)), 0
            )
            yield service


def replica_beside(
    like: ReplicaSpec,
    serving_dir: Path,
    num_replicas: int,
    options: Mapping[str, Any],
    *,
    embedded: bool,
) -> ReplicaSpec:
    """Return the spec of engines like the policy's for another model.

    `serving_dir` has the model's configuration and tokenizer and gets the engines' logs. The engine
    is in this process if `embedded`, as the policy's; else engines have devices of their own.
    """
    changes = {
        "placement": "colocated" if embedded else "disaggregated",
        "num_replicas": num_replicas,
        "options": dict(options),
        "openai_endpoint": False,
        "delta_sync": False,  # its weights are sent once
    }
    return replace(
        like,
        serving_dir=serving_dir,
        rollout=like.rollout.unquantized.model_copy(update=changes),
        log_dir=serving_dir,
        shares_devices=False,
        adapter=None,
    )
