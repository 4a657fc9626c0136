"""Where completions of an RL round come from: engines inside the training ranks, or beside them.

Promises: whatever the place, the same requests and weights come back as the same samples where
one engine takes all of them; nothing is sampled from weights that were not confirmed.
Does not know: rewards, data, or what is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from engines.checkpoint.hub_names import served_float32_names
from engines.config.rollout import RoutingName
from engines.controller.in_process import InProcessGroup
from engines.controller.model_worker import ModelWorker
from engines.controller.pool import Place, this_address
from engines.controller.replica import ReplicaSpec
from engines.controller.worker_group import WorkerGroup
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import Receive
from engines.rollout.publishing import NewTransport, Passage, Probe
from engines.rollout.replica_pool import RestartPolicy
from engines.rollout.service import RolloutService
from engines.types import Completion, RolloutRequest
from engines.weight_sync import shared_memory
from engines.weight_sync.base import SyncReport
from engines.weight_sync.collective import CollectiveTransport
from engines.weight_sync.sharded import ShardedTransport
from hardware.detection import planned
from infra.errors import ConfigError


class Rollout(Protocol):
    """What a trainer sees of its rollout engines."""

    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """Sample every request and wait for all of it.

        Args:
            requests: with ids that differ.
            on_completion: as in `RolloutService.generate`.

        Returns:
            For each request its completions, in the order of its seeds.
        """
        ...

    @property
    def num_restarts(self) -> int:
        """How many engines were lost and replaced."""
        ...

    def publish(self, version: int, probe: Probe | None = None) -> SyncReport:
        """Serve the policy's weights as they are now, as `version`; verified.

        Args:
            version: number of the weights.
            probe: what each engine must pass before it serves.

        Returns:
            What was sent.

        Raises:
            WeightSyncError: an engine holds something else, or fails the probe.
        """
        ...

    def sleep(self) -> None:
        """Before training: give back the device memory that the ranks need.

        Engines on the ranks' devices sample nothing until the next `publish`; others stay as
        they are.
        """
        ...

    def close(self) -> None:
        """Free everything; harmless when repeated."""
        ...


class RankRollout:
    """An engine inside each training rank; every rank samples its share.

    Does not promise: samples before the last one, where the ranks are processes of their own: a
    call of theirs has one answer.

    Args:
        workers: ranks that were built with a rollout engine.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def generate(
        self, requests: Sequence[RolloutRequest], on_completion: Receive | None = None
    ) -> list[list[Completion]]:
        """See `Rollout`."""
        if isinstance(self._workers, InProcessGroup):
            return self._workers.run(ModelWorker.generate, requests, on_completion)
        rows = self._workers.run(ModelWorker.generate, requests)
        for completion in chain.from_iterable(rows):
            if on_completion is not None and completion.finish_reason != "abort":
                on_completion(completion)
        return rows

    @property
    def num_restarts(self) -> int:
        """See `Rollout`; an engine of a rank dies with it."""
        return 0

    def publish(self, version: int, probe: Probe | None = None) -> SyncReport:
        """See `Rollout`."""
        report = self._workers.run(ModelWorker.sync_weights, version)
        if probe is not None:
            places = range(self._workers.world_size)
            requests = [probe.request(place, version) for place in places]
            probe.check(requests, [row[0] for row in self.generate(requests)])
        return report

    def sleep(self) -> None:
        """See `Rollout`."""
        self._workers.run(ModelWorker.sleep)

    def close(self) -> None:
        """The ranks close their engines."""


@dataclass(frozen=True)
class LaunchedEngines:
    """Engines without weights, and what a service over them has to know.

    Attributes:
        engines: one, or the replicas.
        timeout_s: as in `RolloutService`.
        new_transport: makes what carries weights, from the number of workers of each.
        shares_devices: with ranks that train.
        new_adapter_transport: the same for an adapter that travels alone; None where none does.
        routing: as in `RolloutService`.
        restarts: as in `RolloutService`.
    """

    engines: Sequence[RolloutEngine]
    timeout_s: float
    new_transport: NewTransport
    shares_devices: bool
    new_adapter_transport: NewTransport | None = None
    routing: RoutingName = "by_place"
    restarts: RestartPolicy | None = None

    def service(self) -> RolloutService:
        """A service over them, which closes them."""
        return RolloutService(self.engines, self.timeout_s, self.routing, self.restarts)


@dataclass(frozen=True)
class Sender:
    """The process that sends weights to replicas.

    Attributes:
        node: id of its Ray node.
        has_device: whether it has a device of the replicas' platform, where there are devices.
        num_ranks: that hold the weights together with it.
    """

    node: str
    has_device: bool
    num_ranks: int = 1


def choose_transport(
    spec: ReplicaSpec, places: Sequence[Place], sender: Sender, *, adapter: bool = False
) -> NewTransport:
    """What carries tensors to replicas. Ray must be connected.

    Args:
        spec: of the replicas.
        places: of the replicas.
        sender: of the weights.
        adapter: of an adapter alone: small, and read where a replica has no device.

    Returns:
        A function of the number of workers of each.

    Raises:
        ConfigError: shared memory was asked for, and a replica is on another machine.
    """
    rollout = spec.rollout
    names = served_float32_names(spec.serving_dir, getattr(torch, spec.dtype))
    elsewhere = sorted({place.address for place in places if place.node != sender.node})
    if rollout.transport == "shared_memory" and elsewhere:
        raise ConfigError(
            "rollout.transport",
            f"got shared_memory, and replicas on {', '.join(elsewhere)}; need all of them on the "
            "node that sends the weights; choose auto",
        )
    if rollout.transport == "shared_memory" or (rollout.transport == "auto" and not elsewhere):
        return partial(shared_memory.open_transport, spec.dtype, names, rollout.timeout_s)
    platform = planned(spec.platform if sender.has_device and not adapter else "cpu")
    # Weights that an adapter stands on are sent once, and then only the adapter.
    num_senders = sender.num_ranks if spec.adapter is None else 1
    transport = CollectiveTransport if num_senders == 1 else ShardedTransport
    return partial(
        transport.open,
        spec.dtype,
        names,
        rollout.timeout_s,
        this_address(),
        num_senders=num_senders,
        backend=platform.communication_backend,
        device_name=platform.device_name,
    )


class ServedRollout(RolloutService):
    """Engines beside the ranks, which send their weights to them.

    Args:
        engines: they are closed with this.
        workers: ranks that hold the policy.
    """

    def __init__(self, engines: LaunchedEngines, workers: WorkerGroup) -> None:
        super().__init__(engines.engines, engines.timeout_s, engines.routing, engines.restarts)
        self._workers = workers
        self._new_transport = engines.new_transport
        self._new_adapter_transport = engines.new_adapter_transport
        self._shares_devices = engines.shares_devices

    def sleep(self) -> None:
        """See `Rollout`."""
        if self._shares_devices:
            super().sleep()

    def publish(self, version: int, probe: Probe | None = None) -> SyncReport:
        """See `Rollout`."""
        run, new_adapter_transport = self._workers.run, self._new_adapter_transport
        if new_adapter_transport is None:
            send = partial(run, ModelWorker.send_weights)
            return self.sync(self._new_transport, send, version, probe)
        adapter = Passage(new_adapter_transport, partial(run, ModelWorker.send_adapter))
        send = partial(run, ModelWorker.send_frozen_weights)
        return self.sync(self._new_transport, send, version, probe, adapter)
