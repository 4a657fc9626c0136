"""Where completions of an RL round come from: engines inside the training ranks, or beside them.

Promises: whatever the place, the same requests and weights come back as the same samples where
one engine takes all of them; nothing is sampled from weights that were not confirmed.
Does not know: rewards, data, or what is trained.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engines.controller.policy_worker import PolicyWorker
from engines.controller.worker_group import WorkerGroup
from engines.rollout.base import RolloutEngine
from engines.rollout.service import RolloutService
from engines.types import Completion, RolloutRequest
from engines.weight_sync.base import SyncReport, Transport


class Rollout(Protocol):
    """What a trainer sees of its rollout engines."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Sample every request; for each its completions, in the order of its seeds."""
        ...

    def publish(self, version: int) -> SyncReport:
        """Serve the policy's weights as they are now, as `version`; verified."""
        ...

    def close(self) -> None:
        """Free everything; harmless when repeated."""
        ...


class RankRollout:
    """An engine inside each training rank; every rank samples its share.

    Args:
        workers: ranks that were built with a rollout engine.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """See `Rollout`."""
        return self._workers.run(PolicyWorker.generate, requests)

    def publish(self, version: int) -> SyncReport:
        """See `Rollout`."""
        return self._workers.run(PolicyWorker.sync_weights, version)

    def close(self) -> None:
        """The ranks close their engines."""


class ServedRollout(RolloutService):
    """Engines beside the ranks, which send their weights to them.

    Args:
        replicas: the engines; they are closed with this.
        timeout_s: deadline of one batch of requests, and of one weight update.
        workers: ranks that hold the policy.
        new_transport: makes what carries one set of weights to the replicas.
    """

    def __init__(
        self,
        replicas: Sequence[RolloutEngine],
        timeout_s: float,
        workers: WorkerGroup,
        new_transport: Callable[[], Transport],
    ) -> None:
        super().__init__(replicas, timeout_s)
        self._workers = workers
        self._new_transport = new_transport

    def publish(self, version: int) -> SyncReport:
        """See `Rollout`."""
        return self.sync(
            self._new_transport(),
            lambda transport: self._workers.run(PolicyWorker.send_weights, transport),
            version,
        )
