"""A frozen model that engines beside those of the policy serve."""

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
    """A judge or a teacher on disk."""

    replica: ReplicaSpec
    weights_dir: Path

    @contextmanager
    def served_by(self, engines: LaunchedEngines) -> Iterator[RolloutService]:
        """Yield a service over `engines` with the weights sent; it closes the engines."""
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
    """Return the spec of engines like the policy's for another model, on their own devices.

    `serving_dir` has the model's configuration and tokenizer and gets the engines' logs. `embedded`
    is True if the policy's engine is in this process; the model's is then, too.
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
