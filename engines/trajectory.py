"""What is trained on: answers as segments of tokens, in arrays.

Promises: no token of a trajectory is a Python object; a trajectory and its segments are frozen, and
their lengths and types are checked where they are made.
Does not promise who sampled a segment: engines, tools and environments all make them.
Letters: P tokens of a prompt, N tokens of a segment, K further numbers for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engines.types import Completion, RolloutRequest

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Prompt:
    """What several trajectories begin with.

    Attributes:
        name: of the prompt within the run, as in `RolloutRequest.request_id`.
        token_ids_P: (P,) int32.
        images: files of its images, in their order.
    """

    name: str
    token_ids_P: Int32Array
    images: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def of(request: RolloutRequest) -> "Prompt":
        """That of a request."""
        ids_P = np.asarray(request.prompt_ids, np.int32)
        return Prompt(request.request_id, ids_P, request.images)


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive tokens of one origin: the policy, or a tool, an environment, a user.

    Attributes:
        token_ids_N: (N,) int32.
        logprobs_N: (N,) float32, of each token under the distribution that it was sampled from; 0
            where the policy did not sample it.
        version_runs: version of the weights and number of consecutive tokens that they sampled, in
            the order of the tokens; empty where the policy sampled none.
        trained: the tokens are actions of the policy, and the loss is over them.
        reward: what the segment earned, beside the score of the whole; None: nothing of its own.
        images: files of the images in the segment, in their order.
        routes: (N, layers, K) int16, the experts that each token went to; None: not recorded.
        columns: further values by name, each (N,) or (N, K) float32.

    Raises:
        ValueError: arrays of different lengths or other types, or runs of another number of tokens.
    """

    token_ids_N: Int32Array
    logprobs_N: Float32Array
    version_runs: tuple[tuple[int, int], ...] = ()
    trained: bool = True
    reward: float | None = None
    images: tuple[bytes, ...] = field(default=(), repr=False)
    routes: NDArray[np.int16] | None = None
    columns: Mapping[str, Float32Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {"logprobs_N": self.logprobs_N, **self.columns}
        if self.routes is not None:
            arrays["routes"] = self.routes
        for name, array in arrays.items():
            if len(array) != self.num_tokens:
                raise ValueError(f"{name}: got {len(array)} rows; need {self.num_tokens}")
        if self.token_ids_N.dtype != np.int32 or self.logprobs_N.dtype != np.float32:
            types = f"{self.token_ids_N.dtype} and {self.logprobs_N.dtype}"
            raise ValueError(f"token ids and logprobs: got {types}; need int32 and float32")
        counted = sum(count for _, count in self.version_runs)
        if self.version_runs and counted != self.num_tokens:
            raise ValueError(f"version_runs: got {counted} tokens; need {self.num_tokens}")

    @staticmethod
    def sampled(
        token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> "Segment":
        """What a policy sampled.

        Args:
            token_ids: N tokens.
            logprobs: of each.
            versions: of the weights that sampled each.
        """
        runs = tuple((version, len([*run])) for version, run in groupby(versions))
        return Segment(
            np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32), version_runs=runs
        )

    @staticmethod
    def given(token_ids: Sequence[int] | Int32Array, images: tuple[bytes, ...] = ()) -> "Segment":
        """What somebody else wrote; it is not trained on."""
        tokens_N = np.asarray(token_ids, np.int32)
        return Segment(tokens_N, np.zeros(len(tokens_N), np.float32), trained=False, images=images)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids_N)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A prompt and everything that followed it.

    Attributes:
        prompt: that it begins with.
        sample: index of the trajectory among those of its prompt.
        segments: behind the prompt, in their order.
        finish: what ended it: `stop`, `length` or `abort`.
        parent: index of the sample that it branched off; None: of none.
        branch_point: number of tokens behind the prompt that are the parent's too; they are
            trained on there.

    Raises:
        ValueError: a branch point without a parent, or behind the last token.
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
        """A single answer: one trained segment."""
        segment = Segment.sampled(
            completion.token_ids, completion.logprobs, completion.policy_versions
        )
        return Trajectory(prompt, completion.sample_index, (segment,), completion.finish_reason)

    @property
    def name(self) -> str:
        """What it is called in an error line."""
        return f"{self.prompt.name} sample {self.sample}"

    @property
    def num_sampled(self) -> int:
        """Tokens behind the prompt, of all segments."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def token_ids(self) -> Int32Array:
        """(num_sampled,) int32, the tokens of all segments."""
        parts = [segment.token_ids_N for segment in self.segments]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def images(self) -> tuple[bytes, ...]:
        """Files of all its images, in the order in which they are shown."""
        of_segments = (image for segment in self.segments for image in segment.images)
        return (*self.prompt.images, *of_segments)
