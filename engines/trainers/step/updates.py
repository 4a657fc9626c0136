"""The optimizer steps of one RL step, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import TrainMetrics


@dataclass(frozen=True)
class Updates:
    """The optimizer steps of one RL step.

    Attributes:
        policy: applied updates in order; none while the critic warms up.
        trained_critic: True if the step trained the critic.
        num_poisoned: updates of either role that were left out.
    """

    policy: tuple[TrainMetrics, ...] = ()
    critic: tuple[TrainMetrics, ...] = ()
    trained_critic: bool = False
    num_poisoned: int = 0


def update_metrics(prefix: str, updates: Sequence[TrainMetrics]) -> dict[str, float]:
    """Return the mean of a role's metrics over its updates; the maximum if named `*_max`."""
    if not updates:
        return {}
    merged: dict[str, list[float]] = {}
    for update in updates:
        own = {f"{prefix}/loss": update.loss, f"{prefix}/grad_norm": update.grad_norm}
        for name, value in {**own, **update.metrics}.items():
            merged.setdefault(name, []).append(value)
    return {
        **{
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in merged.items()
        },
        f"{prefix}/lr": updates[-1].lr,
        f"{prefix}/num_updates": float(len(updates)),
    }
