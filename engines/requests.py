"""What a rollout engine is asked, and what it answers.

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
    """A form that a sample has to have; exactly one of the three.

    Attributes:
        json_schema: JSON Schema, as JSON text.
        regex: that the whole text matches.
        choice: texts, of which it is one.
    """

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

    Reported logprobs are of this distribution. What ends a sample changes none of its tokens: it
    is the sample that would have been drawn without it, up to and with the token that ends it.

    Attributes:
        max_new_tokens: limit of a sample, the prefix that it continues included.
        temperature: 0 is greedy.
        top_p: 1 is off.
        top_k: 0 is off.
        stop: texts that end a sample, with the token that completes the first of them; looked
            for in the text of the sampled tokens without special ones. The text of a special
            token means that token.
        stop_token_ids: tokens that end it, beside the model's own end-of-sequence tokens.
        structured_output: form of a sample; for engines with that capability. Tokens that do not
            fit have probability 0, and the logprobs say so.
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

    A sample that was cut short is asked for again with the tokens it had as its prefix. It goes
    on in the random stream of its seed behind them, repeats no draw, and its completion holds the
    new tokens alone: logprobs and versions of the old ones are in the completion that the caller
    has, and no engine could tell them anew, since other weights may have sampled them.

    Attributes:
        request_id: stable name of the prompt within the run (`round=1/step=3/prompt=17`).
        prompt_ids: token ids of the prompt, at least one.
        seeds: one seed per sample, derived from (run seed, round, prompt id, sample index, turn),
            so that sampling does not depend on scheduling.
        prefixes: for each seed the tokens that its sample has drawn before; () where all of them
            start at the prompt.
        draw_offsets: for each seed how many numbers of its stream are spent; () counts the
            tokens of its prefix. Given where those tokens stand in the prompt instead.
        sample_indices: for each seed the index by which its completion names the sample; () is
            0, 1, 2, ... Given where a request asks for some samples of an earlier one.
        turn: of a conversation, counted from 0; already in the seeds.
        session: requests of one session are best served by one replica, which has the keys and
            values of earlier turns; None for a request of its own.
        images: files (PNG, JPEG, WebP) of the images in the prompt, in their order; for engines
            with that capability. For each the prompt has a run of placeholder tokens, as many as
            the model makes features of it.
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
        """Samples asked for."""
        return len(self.seeds)

    @property
    def sample_keys(self) -> tuple[tuple[str, int], ...]:
        """(request id, sample index) of each sample: what is accepted once."""
        return tuple((self.request_id, self.sample_index(at)) for at in range(self.num_samples))

    def prefix(self, place: int) -> tuple[int, ...]:
        """Tokens that the sample of seed number `place` continues."""
        return self.prefixes[place] if self.prefixes else ()

    def draw_offset(self, place: int) -> int:
        """Number of the stream of seed number `place` that its next token uses."""
        return self.draw_offsets[place] if self.draw_offsets else len(self.prefix(place))

    def sample_index(self, place: int) -> int:
        """Index by which the sample of seed number `place` is named."""
        return self.sample_indices[place] if self.sample_indices else place

    def select(self, sample_indices: Iterable[int]) -> "RolloutRequest":
        """The same request for the samples of these indices alone, in the given order."""
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
        """The request for the rest of some of its samples; `Completion.then` puts them together.

        Args:
            partials: what there is of these samples, in any order.

        Returns:
            A request for them alone, in the order of the partials.
        """
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
        request_id: the request it answers.
        sample_index: of the sample, see `RolloutRequest.sample_indices`.
        tokens: that were sampled, without the prefix; the token that ended it is the last one.
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
        """From N token ids, N logprobs and N versions or none; a ValueError if N differs."""
        tokens = Segment.sampled(token_ids, logprobs, policy_versions)
        named = {"request_id": request_id, "sample_index": sample_index}
        vars(self).update(named, tokens=tokens, finish_reason=finish_reason)

    @property
    def token_ids(self) -> Int32Array:
        """(N,) int32."""
        return self.tokens.token_ids_N

    @property
    def logprobs(self) -> Float32Array:
        """(N,) float32, of each token under the sampling distribution."""
        return self.tokens.logprobs_N

    @property
    def policy_versions(self) -> Int64Array:
        """(N,) int64, of the weights that sampled each token."""
        return self.tokens.versions_N

    def then(self, rest: "Completion") -> "Completion":
        """This partial sample and what was sampled behind it, as one."""
        return Completion(
            rest.request_id,
            rest.sample_index,
            np.concatenate([self.token_ids, rest.token_ids]),
            np.concatenate([self.logprobs, rest.logprobs]),
            np.concatenate([self.policy_versions, rest.policy_versions]),
            rest.finish_reason,
        )
