"""Trajectories: a prompt and the segments after it, in arrays, as training reads them.

Promises: no token of a trajectory is a Python object.
Letters: P tokens of a prompt.
"""

from dataclasses import dataclass, field

import numpy as np

from engines.requests import Int32Array, Segment
from engines.types import Completion, RolloutRequest


@dataclass(frozen=True, eq=False)
class Prompt:
    """Common beginning of several trajectories; `name` is a `RolloutRequest.request_id`."""

    name: str
    token_ids_P: Int32Array
    images: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def of(request: RolloutRequest) -> "Prompt":
        """Return the prompt of a request."""
        return Prompt(request.request_id, np.asarray(request.prompt_ids, np.int32), request.images)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and everything after it.

    Attributes:
        sample: index among the trajectories of the prompt.
        finish: what ended it: `stop`, `length` or `abort`.
        parent: index of the sample that it branched off; None if it did not.
        branch_point: tokens after the prompt that are shared with the parent, trained only there.
    """

    prompt: Prompt
    sample: int
    segments: tuple[Segment, ...]
    finish: str
    parent: int | None = None
    branch_point: int = 0

    def __post_init__(self) -> None:
        limit = 0 if self.parent is None else self.num_sampled
        if not 0 <= self.branch_point <= limit:
            raise ValueError(f"branch_point: got {self.branch_point}; need 0 to {limit}")

    @staticmethod
    def of(prompt: Prompt, completion: Completion) -> "Trajectory":
        """Return the trajectory of a single answer: one trained segment."""
        return Trajectory(
            prompt, completion.sample_index, (completion.tokens,), completion.finish_reason
        )

    @property
    def name(self) -> str:
        """Name for error texts."""
        return f"{self.prompt.name} sample {self.sample}"

    @property
    def num_sampled(self) -> int:
        """Number of tokens after the prompt, over all segments."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def token_ids(self) -> Int32Array:
        """(num_sampled,) int32 tokens of all segments."""
        parts = [segment.token_ids_N for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Files of all images, in the order in which they are shown."""
        return (
            *self.prompt.images,
            *(image for segment in self.segments for image in segment.images),
        )
