"""Requests to a rollout engine and its answers.

Promises: nothing in a request depends on when or where it is sampled.
Letters: N tokens of a sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from engines.segments import Float32Array, Int32Array, Int64Array, Segment


@dataclass(frozen=True)
class StructuredOutput:
    """Form of a sample: exactly one of JSON Schema (as text), regular expression, allowed texts."""

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
        temperature: 0 is greedy; `top_p` 1 and `top_k` 0 are off.
        stop: texts that end a sample at the token that completes the first of them. They are
            searched in the text of the sampled tokens without special tokens; the text of a special
            token stands for that token.
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
        draw_offsets: for each seed, how many numbers of its stream are used up; () is the length of
            its prefix. Needed if the earlier tokens are in the prompt instead.
        sample_indices: for each seed, the sample index of its completion; () is 0, 1, 2, ... Needed
            if a request asks for some samples of an earlier one.
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
        """Return the request for the rest of some partial samples; `Completion.then` joins both."""
        chosen = self.select(partial.sample_index for partial in partials)
        drawn = [partial.token_ids.tolist() for partial in partials]
        return replace(
            chosen,
            prefixes=tuple((*chosen.prefix(at), *ids) for at, ids in enumerate(drawn)),
            draw_offsets=tuple(chosen.draw_offset(at) + len(ids) for at, ids in enumerate(drawn)),
        )


@dataclass(frozen=True, init=False)
class Completion:
    """One finished sample.

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
        tokens = Segment.sampled(token_ids, logprobs, policy_versions)
        named = {"request_id": request_id, "sample_index": sample_index}
        vars(self).update(named, tokens=tokens, finish_reason=finish_reason)

    @property
    def token_ids(self) -> Int32Array:
        """(N,) int32."""
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
