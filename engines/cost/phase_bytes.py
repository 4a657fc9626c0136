"""What one rank holds on its device in one phase of a stage, by what holds it.

The plan computes it from shapes and the memory audit counts it, so the two can be compared field
by field.
"""

from dataclasses import dataclass, fields
from typing import Literal

Phase = Literal["train", "sync", "sample"]
"""Phases of a rank: a forward and backward pass with its optimizer step, a sync, sampling."""


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes on one device at the peak of a phase.

    Attributes:
        moment_bytes: both of Adam's moments, and an average of the weights if one is kept.
        saved_bytes: tensors that the backward pass needs, without parameters.
        bucket_bytes: buffers of collectives and of the weight sync.
        engine_bytes: weights of a rollout engine; 0 if it samples from the parameters themselves.
        cache_bytes: keys and values of a rollout engine.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    moment_bytes: int = 0
    saved_bytes: int = 0
    bucket_bytes: int = 0
    engine_bytes: int = 0
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all fields."""
        return sum(getattr(self, field.name) for field in fields(self))
