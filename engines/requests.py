"""Requests to a rollout engine, its answers, and segments: arrays of tokens of one origin.

Promises: a request depends on when or where it is sampled only by the prefixes of samples that were
cut short; answers hold their tokens in arrays, whose lengths and dtypes are checked.
Letters: N tokens of a sample or segment, K values per token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
        """(N,) int64 version of each token, from `version_runs`; empty if not known."""
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


@dataclass(frozen=True)
class StructuredOutput:
    """Form that a sample must have: exactly one of JSON Schema text, regular expression, choice."""

    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"structured output: got {' and '.join(given) or 'nothing'}; need one of "
                "json_schema, regex and choice"
            )


@dataclass(frozen=True)
class SamplingParams:
    """The sampling distribution of one request, and what ends a sample.

    Reported logprobs are of this distribution. A stop condition does not change any token: the
    sample is the one that would be drawn without it, up to and including the token that ends it.

    Attributes:
        max_new_tokens: limit per sample, including a prefix that it continues.
        temperature: 0 is greedy, with logprobs of temperature 1; `top_p` 1 and `top_k` 0 are off.
        stop: texts; a sample ends with the token that completes one of them. They are searched in
            the text of the sample without special tokens; a text that equals a special token
            matches that token.
        stop_token_ids: tokens that end a sample besides the model's own end-of-sequence tokens.
        structured_output: needs that engine capability. Tokens that do not fit have probability 0,
            also in the logprobs.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt, sampled `num_samples` times.

    A sample that was cut short is continued by a request with its tokens as prefix: it continues in
    the random stream of its seed. The completion holds only the new tokens, because the old ones
    may come from other weights.

    Attributes:
        request_id: stable name of the prompt within the run (`round=1/step=3/prompt=17`).
        seeds: one per sample, derived from (run seed, round, prompt id, sample index, turn), so
            that sampling does not depend on scheduling.
        prefixes: for each seed, the tokens that its sample already has; () if all start at the
            prompt.
        draw_offsets: for each seed, number of draws from its random stream so far; () is the length
            of its prefix. Needed if the earlier tokens are in the prompt, not in a prefix.
        sample_indices: for each seed, the sample index of its completion; () is 0, 1, 2, ... Needed
            if the request is for only some samples of an earlier request.
        turn: turn of a conversation, from 0; already part of the seeds.
        session: requests of one session are best served by one replica, which has their KV cache;
            None for a single request.
        images: files (PNG, JPEG, WebP) in order; needs that engine capability. The prompt has one
            run of placeholder tokens per image, one token per feature.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    prefixes: tuple[tuple[int, ...], ...] = ()
    draw_offsets: tuple[int, ...] = ()
    sample_indices: tuple[int, ...] = ()
    turn: int = 0
    session: str | None = None
    images: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.seeds)

    @property
    def sample_keys(self) -> tuple[tuple[str, int], ...]:
        """(request id, sample index) of each sample; each key is accepted once."""
        return tuple((self.request_id, self.sample_index(at)) for at in range(self.num_samples))

    def prefix(self, place: int) -> tuple[int, ...]:
        """Return the tokens that the sample of seed number `place` continues."""
        return self.prefixes[place] if self.prefixes else ()

    def draw_offset(self, place: int) -> int:
        """Return the position in the random stream of seed number `place` for its next token."""
        return self.draw_offsets[place] if self.draw_offsets else len(self.prefix(place))

    def sample_index(self, place: int) -> int:
        """Return the sample index of seed number `place`."""
        return self.sample_indices[place] if self.sample_indices else place

    def select(self, sample_indices: Iterable[int]) -> "RolloutRequest":
        """Return the request for these samples only, in the given order."""
        names = [self.sample_index(place) for place in range(self.num_samples)]
        places = [names.index(index) for index in sample_indices]
        return replace(
            self,
            seeds=tuple(self.seeds[place] for place in places),
            prefixes=tuple(self.prefixes[place] for place in places if self.prefixes),
            draw_offsets=tuple(self.draw_offsets[place] for place in places if self.draw_offsets),
            sample_indices=tuple(names[place] for place in places),
        )

    def behind(self, partials: Sequence["Completion"]) -> "RolloutRequest":
        """Return the request that continues partial samples; `Completion.then` joins the parts."""
        chosen = self.select(partial.sample_index for partial in partials)
        drawn = [partial.token_ids.tolist() for partial in partials]
        return replace(
            chosen,
            prefixes=tuple((*chosen.prefix(at), *ids) for at, ids in enumerate(drawn)),
            draw_offsets=tuple(chosen.draw_offset(at) + len(ids) for at, ids in enumerate(drawn)),
        )


@dataclass(frozen=True, init=False)
class Completion:
    """One sample, complete or cut short (`abort`).

    Attributes:
        sample_index: see `RolloutRequest.sample_indices`.
        tokens: sampled tokens without the prefix, including the token that ended the sample.
        finish_reason: `stop` (end-of-sequence, stop token or stop string), `length` or `abort`.
    """

    request_id: str
    sample_index: int
    tokens: Segment
    finish_reason: str

    def __init__(
        self,
        request_id: str,
        sample_index: int,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        policy_versions: ArrayLike,
        finish_reason: str,
    ) -> None:
        """Make a completion from N token ids, N logprobs and N or 0 versions."""
        vars(self).update(
            request_id=request_id,
            sample_index=sample_index,
            tokens=Segment.sampled(token_ids, logprobs, policy_versions),
            finish_reason=finish_reason,
        )

    @property
    def token_ids(self) -> Int32Array:
        """(N,) int32 sampled tokens."""
        return self.tokens.token_ids_N

    @property
    def logprobs(self) -> Float32Array:
        """(N,) float32 under the sampling distribution."""
        return self.tokens.logprobs_N

    @property
    def policy_versions(self) -> Int64Array:
        """(N,) int64 version of the weights that sampled each token; empty if not known."""
        return self.tokens.versions_N

    def then(self, rest: "Completion") -> "Completion":
        """Join this partial sample and its continuation `rest`."""
        return Completion(
            rest.request_id,
            rest.sample_index,
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            np.concatenate([self.policy_versions, rest.policy_versions]),
            rest.finish_reason,
        )


Generate = Callable[[Sequence[RolloutRequest]], list[list[Completion]]]
"""Returns the completions of requests, those of a request in the order of its seeds."""
