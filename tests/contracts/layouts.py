"""The ways of spreading a model over ranks that the backend contract knows."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """One way of spreading a model over ranks.

    Attributes:
        name: of the layout.
        world_size: number of ranks.
        needs: dimensions of parallelism that the backend must claim.
        training: settings of the layout.
        model: tiny model that it is tried on.
    """

    name: str
    world_size: int
    needs: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"


LAYOUTS = (
    Layout("alone", 1),
    Layout("data2", 2, ("data",)),
    Layout("tensor2", 2, ("tensor",), {"tensor_parallel_size": 2}),
    Layout(
        "tensor2-whole-activations", 2, ("tensor",),
        {"tensor_parallel_size": 2, "sequence_parallel": False},
    ),
    Layout("pipeline2", 2, ("pipeline",), {"pipeline_parallel_size": 2}),
    Layout(
        "pipeline2-virtual2", 2, ("virtual pipeline",),
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    ),
    Layout("context2", 2, ("context",), {"context_parallel_size": 2}),
    Layout("ulysses2", 2, ("ulysses",), {"ulysses_size": 2}),
    Layout("expert2", 2, ("expert",), {"expert_parallel_size": 2}, "qwen3_moe"),
    Layout("data4", 4, ("data",)),
    Layout("hybrid2x2", 4, ("hybrid",), {"replicate_size": 2}),
    Layout("data2-ulysses2", 4, ("ulysses",), {"ulysses_size": 2}),
    Layout("ulysses4", 4, ("ulysses",), {"ulysses_size": 4}),
    Layout("data2-tensor2", 4, ("tensor",), {"tensor_parallel_size": 2}),
    Layout(
        "tensor2-pipeline2", 4, ("tensor", "pipeline"),
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ),
    Layout(
        "tensor2-expert2", 4, ("tensor", "expert"),
        {"tensor_parallel_size": 2, "expert_parallel_size": 2}, "qwen3_moe",
    ),
)  # fmt: skip
"""In this order: each sees the checkpoints of the world sizes before it."""
PRIMARY = ("alone", "data2")
"""Layouts under which every way of computing is tried; the others prove the layout."""

ACCUMULATED = ("data2", "hybrid2x2")
"""Layouts whose gradients are shards of a half: how they add up over micro-batches is looked at."""


def claimed_layouts(claims: Collection[str], world_size: int) -> list[Layout]:
    """The layouts of a world size that a backend must master.

    Args:
        claims: dimensions of parallelism of the backend.
        world_size: number of ranks.

    Returns:
        In a fixed order; a world size of 1 has exactly one.
    """
    return [
        layout
        for layout in LAYOUTS
        if layout.world_size == world_size and set(layout.needs) <= {"data", *claims}
    ]
