"""The optimizer steps of one RL step, and what they report."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import TrainMetrics


@dataclass(frozen=True)
class Updates:
    """The optimizer steps of one RL step.

    Attributes:
        policy: those of the policy that were taken, in their order; none while a critic warms up.
        critic: the same of the critic, where there is one.
        trained_critic: the critic had its part of the step.
        num_poisoned: updates of either that were left out.
    """

    policy: tuple[TrainMetrics, ...] = ()
    critic: tuple[TrainMetrics, ...] = ()
    trained_critic: bool = False
    num_poisoned: int = 0


def update_metrics(prefix: str, updates: Sequence[TrainMetrics]) -> dict[str, float]:
    """The optimizer steps of a role in one RL step: their mean, and the largest of every maximum.

    Args:
        prefix: of the names: `actor` or `critic`.
        updates: that were taken.

    Returns:
        Nothing where there was none.
    """
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
