"""Consecutive tokens of one origin, in arrays.

Promises: no token is a Python object; lengths and dtypes of the arrays are checked.
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
    """Consecutive tokens of one origin: the policy, a tool, an environment or a user.

    Attributes:
        logprobs_N: (N,) float32 under the sampling distribution; 0 if the policy did not sample it.
        version_runs: (version of the weights, number of consecutive tokens sampled from it), in
            token order; empty if the policy sampled none or the versions are not known.
        trained: the tokens are actions of the policy and enter the loss.
        reward: reward of this segment, besides the score of the whole; None: no own reward.
        images: files of the images in the segment, in order.
        routes: (N, layers, K) int16, experts of each token; None: not recorded.
        columns: further values by name, each (N,) or (N, K) float32.
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
        """Return a trained segment of N tokens that a policy sampled.

        Args:
            versions: version of the weights for each token; empty if not known.
        """
        return Segment(
            np.asarray(token_ids, np.int32),
            np.asarray(logprobs, np.float32),
            _runs(np.asarray(versions, np.int64)),
        )

    @staticmethod
    def given(token_ids: ArrayLike, images: tuple[bytes, ...] = ()) -> "Segment":
        """Return an untrained segment of tokens that the policy did not sample."""
        tokens_N = np.asarray(token_ids, np.int32)
        return Segment(tokens_N, np.zeros(len(tokens_N), np.float32), trained=False, images=images)

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return len(self.token_ids_N)

    @property
    def versions_N(self) -> Int64Array:
        """(N,) int64 version of each token, expanded from `version_runs`."""
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
    """Run-length encode the versions."""
    if not len(versions_N):
        return ()
    first = int(versions_N[0])
    if (versions_N == first).all():  # fast path for nearly every sample: 10x cheaper
        return ((first, len(versions_N)),)
    starts = np.flatnonzero(np.diff(versions_N, prepend=first - 1))
    counts = np.diff(starts, append=len(versions_N))
    return tuple(zip(versions_N[starts].tolist(), counts.tolist(), strict=True))
