"""A model that engines beside those of the policy serve, and whose weights never change."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.checkpoint.tensor_files import stored_tensors
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import LaunchedEngines
from engines.rollout.service import RolloutService


@dataclass(frozen=True)
class FrozenModel:
    """Such a model on disk: a judge, a teacher.

    Attributes:
        replica: engines that serve it.
        weights_dir: holds its weights.
    """

    replica: ReplicaSpec
    weights_dir: Path

    @contextmanager
    def served_by(self, engines: LaunchedEngines) -> Iterator[RolloutService]:
        """Scope in which engines serve it; its weights are sent at the start.

        Args:
            engines: of `replica`, without weights.

        Yields:
            RolloutService: closed behind the scope, and the engines with it.

        Raises:
            WeightSyncError: an engine did not take them.
        """
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
    """Engines of the kind that serves the policy, for another model.

    Args:
        like: of the policy.
        serving_dir: the model's configuration and tokenizer; gets the logs of the engines.
        num_replicas: of those that are in processes of their own.
        options: of the engine, instead of the policy's.
        embedded: the policy's engine is in this process, and so is this one.

    Returns:
        On devices that no rank has.
    """
    changes = {
        "placement": "colocated" if embedded else "disaggregated",
        "num_replicas": num_replicas,
        "options": dict(options),
        "openai_endpoint": False,
    }
    return replace(
        like,
        serving_dir=serving_dir,
        rollout=like.rollout.model_copy(update=changes),
        log_dir=serving_dir,
        shares_devices=False,
        adapter=None,
    )
