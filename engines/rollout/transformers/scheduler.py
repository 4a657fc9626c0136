"""Which samples wait and which join the running batch; plain Python, no tensors.

Promises: first come, first served; samples of one request that join together share one prefill
of their prompt; samples sent back by a weight update go first and keep their order; what joins
together fits the token budget of a prefill, padding counted, unless it is one long prompt.
Nothing here influences what is sampled: a sample's randomness comes from its seed alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from engines.rollout.stop_strings import SampledText
from engines.types import Completion, RolloutRequest


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request, waiting or running.

    Attributes:
        request: the request it belongs to.
        place: which of the request's seeds it uses.
        call: identifies the call of `generate` that waits for it.
        stop_token_ids: tokens that end it.
        text: in which stop strings are looked for; None where there are none.
        token_ids: tokens sampled so far, those of its prefix included.
        logprobs: of the tokens behind the prefix.
        versions: policy versions of the first of these; the current version sampled the rest.
        stopped: its last token ended it.
    """

    request: RolloutRequest
    place: int
    call: int
    stop_token_ids: frozenset[int] = frozenset()
    text: SampledText | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prefix(self.place))

    @property
    def key(self) -> tuple[str, int]:
        """Request id and sample index."""
        return self.request.request_id, self.request.sample_index(self.place)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens together."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def stream_origin(self) -> int:
        """Position of the token that used, or would have used, the first number of its stream."""
        at = self.request.prefix(self.place)
        return len(self.request.prompt_ids) + len(at) - self.request.draw_offset(self.place)

    def append(self, token: int, logprob: float) -> bool:
        """Take a sampled token; returns whether the sample is finished."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.stop_token_ids or (
            self.text is not None and self.text.contains_stop([token]) is not None
        )
        return self.stopped or len(self.token_ids) >= self.request.sampling.max_new_tokens

    def stamp(self, version: int) -> None:
        """Note `version` as the one that sampled every token without a note."""
        self.versions.extend([version] * (len(self.logprobs) - len(self.versions)))

    def completion(self, finish_reason: str, version: int) -> Completion:
        """The finished sample; `version` sampled the tokens without a note."""
        self.stamp(version)
        request_id, sample_index = self.key
        num_given = len(self.token_ids) - len(self.logprobs)
        return Completion(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=self.token_ids[num_given:],
            logprobs=self.logprobs,
            policy_versions=self.versions,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True)
class Prefix:
    """Tokens to prefill once, and the samples that continue them.

    Attributes:
        token_ids: the prompt, and what a sample that was sent back or resubmitted has sampled.
        samples: at least one; more only while none has sampled a token.
    """

    token_ids: Sequence[int]
    samples: tuple[Sample, ...]

    @property
    def shared(self) -> bool:
        """Whether it is a bare prompt, which further samples may continue later."""
        return not self.samples[0].token_ids


class Scheduler:
    """The waiting line in front of a batch of limited size.

    Args:
        max_num_sequences: samples that run together at most.
    """

    def __init__(self, max_num_sequences: int) -> None:
        self._max_num_sequences = max_num_sequences
        # A prefill costs a forward pass of its own whatever its size, so joining one by one
        # would double the number of passes: let an eighth of the batch come together.
        self._min_free = max(1, max_num_sequences // 8)
        self._waiting: deque[Sample] = deque()

    @property
    def waiting(self) -> Sequence[Sample]:
        """Samples in line, the next one first."""
        return self._waiting

    def add(self, samples: Iterable[Sample]) -> None:
        """Put new samples at the end of the line."""
        self._waiting.extend(samples)

    def send_back(self, samples: Sequence[Sample]) -> None:
        """Put samples that were running at the head of the line, in their order."""
        self._waiting.extendleft(reversed(samples))

    def remove(self, condition: Callable[[Sample], bool]) -> list[Sample]:
        """Take the samples that meet a condition out of the line."""
        removed = [sample for sample in self._waiting if condition(sample)]
        if removed:
            self._waiting = deque(s for s in self._waiting if not condition(s))
        return removed

    def next_prefixes(self, num_running: int) -> list[Prefix]:
        """Take the samples that join now out of the line, grouped by what they continue."""
        num_free = self._max_num_sequences - num_running
        if not self._waiting or (num_running and num_free < self._min_free):
            return []
        groups: list[list[Sample]] = []
        for _ in range(min(num_free, len(self._waiting))):
            sample = self._waiting.popleft()
            if groups and _share_prefix(groups[-1][0], sample):
                groups[-1].append(sample)
            else:
                groups.append([sample])
        return [
            Prefix([*group[0].request.prompt_ids, *group[0].token_ids], tuple(group))
            for group in groups
        ]


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into chunks whose padded size is at most `max_tokens`.

    Sorted by length, so that a chunk's sequences are about equally long. A sequence longer than
    the budget is a chunk of its own.

    Args:
        lengths: tokens of each sequence.
        max_tokens: limit of (number of sequences) x (longest sequence).

    Returns:
        Indices into `lengths`, each exactly once; no chunk is empty.
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if chunks and (len(chunks[-1]) + 1) * lengths[index] <= max_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def fill_holes(num_rows: int, leaving: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """How the rows of a batch close up when some leave: the last ones move into the holes.

    Args:
        num_rows: rows before.
        leaving: rows that leave.

    Returns:
        The old row at each new place; the rows that move; the places they move to.
    """
    num_left = num_rows - len(leaving)
    holes = sorted(row for row in leaving if row < num_left)
    movers = [row for row in range(num_left, num_rows) if row not in leaving]
    order = list(range(num_left))
    for hole, mover in zip(holes, movers, strict=True):
        order[hole] = mover
    return order, movers, holes


def _share_prefix(first: Sample, other: Sample) -> bool:
    return first.request is other.request and not first.token_ids and not other.token_ids
