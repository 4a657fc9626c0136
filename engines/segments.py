"""Tokens of one origin, in arrays.

Promises: no token of a segment is a Python object; lengths and types of its arrays are checked
where it is made; two segments are equal where all their values are.
Does not promise who made the tokens: engines, tools and environments all do.
Letters: N tokens of a segment, K further numbers for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]


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
        arrays: dict[str, NDArray[Any] | None] = {
            "logprobs_N": self.logprobs_N,
            "routes": self.routes,
            **self.columns,
        }
        for name, array in arrays.items():
            if array is not None and len(array) != self.num_tokens:
                raise ValueError(f"{name}: got {len(array)} rows; need {self.num_tokens}")
        if self.token_ids_N.dtype != np.int32 or self.logprobs_N.dtype != np.float32:
            types = f"{self.token_ids_N.dtype} and {self.logprobs_N.dtype}"
            raise ValueError(f"token ids and logprobs: got {types}; need int32 and float32")
        counted = sum(count for _, count in self.version_runs)
        if self.version_runs and counted != self.num_tokens:
            raise ValueError(f"version_runs: got {counted} tokens; need {self.num_tokens}")

    @staticmethod
    def sampled(token_ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike) -> "Segment":
        """What a policy sampled.

        Args:
            token_ids: of N tokens.
            logprobs: of each.
            versions: of the weights that sampled each; empty where they are not known.

        Returns:
            A trained segment.

        Raises:
            ValueError: another number of logprobs, or of versions that are known, than of tokens.
        """
        return Segment(
            np.asarray(token_ids, np.int32),
            np.asarray(logprobs, np.float32),
            _runs(np.asarray(versions, np.int64)),
        )

    @staticmethod
    def given(token_ids: ArrayLike, images: tuple[bytes, ...] = ()) -> "Segment":
        """What somebody else wrote; it is not trained on."""
        tokens_N = np.asarray(token_ids, np.int32)
        return Segment(tokens_N, np.zeros(len(tokens_N), np.float32), trained=False, images=images)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids_N)

    @property
    def versions_N(self) -> Int64Array:
        """(N,) int64, of `version_runs`."""
        runs = np.array(self.version_runs, np.int64).reshape(-1, 2)
        return np.repeat(runs[:, 0], runs[:, 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        ours, theirs = self._values(), other._values()
        return ours.keys() == theirs.keys() and all(
            np.array_equal(value, theirs[name], equal_nan=True)
            if isinstance(value, np.ndarray)
            else value == theirs[name]
            for name, value in ours.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def _values(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        columns = values.pop("columns")
        return values | {f"columns.{name}": column for name, column in columns.items()}


def _runs(versions_N: Int64Array) -> tuple[tuple[int, int], ...]:
    """Each version and the number of consecutive tokens that have it."""
    if not len(versions_N):
        return ()
    first = int(versions_N[0])
    if (versions_N == first).all():  # nearly every sample; the rest costs ten times as much
        return ((first, len(versions_N)),)
    starts = np.flatnonzero(np.diff(versions_N, prepend=first - 1))
    counts = np.diff(starts, append=len(versions_N))
    return tuple(zip(versions_N[starts].tolist(), counts.tolist(), strict=True))
