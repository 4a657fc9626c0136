"""Decides which samples join the running batch of the engine `transformers`.

Promises: first come, first served; samples sent back by a weight update go first. Samples of one
request that join together share one prefill of their prompt.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from engines.rollout.engine_state import SampleOfCall
from engines.rollout.stop_strings import SampledText
from engines.types import Completion


@dataclass(eq=False, slots=True)
class Sample(SampleOfCall):
    """One sample of a request, waiting or running.

    Attributes:
        token_ids: the prefix, if the request has one, and the tokens sampled so far.
        logprobs: one for each sampled token, without the prefix.
        versions: policy version of each sampled token until the last `stamp`; later ones have none.
    """

    eos_token_ids: frozenset[int] = frozenset()
    text: SampledText | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.prefix(self.place))

    @property
    def num_tokens(self) -> int:
        """Number of prompt and sampled tokens."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def stream_origin(self) -> int:
        """Position of the token that uses, or would have used, number 0 of the random stream."""
        num_given = len(self.request.prompt_ids) + len(self.request.prefix(self.place))
        return num_given - self.request.draw_offset(self.place)

    def append(self, token: int, logprob: float) -> bool:
        """Append a sampled token; return True if the sample is finished."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.stopped = (
            token in self.eos_token_ids
            or token in self.request.sampling.stop_token_ids
            or (self.text is not None and self.text.contains_stop([token]) is not None)
        )
        return self.stopped or len(self.token_ids) >= self.request.sampling.max_new_tokens

    def stamp(self, version: int) -> None:
        """Record `version` for every sampled token that has no version yet."""
        self.versions.extend([version] * (len(self.logprobs) - len(self.versions)))

    def completion(self, finish_reason: str, version: int) -> Completion:
        """Return the finished sample; tokens without a version get `version`."""
        self.stamp(version)
        return Completion(
            *self.key,
            token_ids=self.token_ids[len(self.token_ids) - len(self.logprobs) :],
            logprobs=self.logprobs,
            policy_versions=self.versions,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True)
class Prefix:
    """A prompt, with sampled tokens if any, to prefill once, and the samples that continue it."""

    token_ids: Sequence[int]
    samples: tuple[Sample, ...]

    @property
    def shared(self) -> bool:
        """True if it is a bare prompt, which further samples may continue later."""
        return not self.samples[0].token_ids


class Scheduler:
    """The queue in front of a batch of at most `max_num_sequences` samples."""

    def __init__(self, max_num_sequences: int) -> None:
        self._max_num_sequences = max_num_sequences
        # A prefill costs a forward pass of its own whatever its size, so joining one by one
        # would double the number of passes: let an eighth of the batch come together.
        self._min_free = max(1, max_num_sequences // 8)
        self.waiting: deque[Sample] = deque()
        """Queued samples, the next one first."""

    def add(self, samples: Iterable[Sample]) -> None:
        """Append new samples to the queue."""
        self.waiting.extend(samples)

    def send_back(self, samples: Sequence[Sample]) -> None:
        """Put samples that were running at the head of the queue, in their order."""
        self.waiting.extendleft(reversed(samples))

    def remove(self, condition: Callable[[Sample], bool]) -> list[Sample]:
        """Remove and return the queued samples that meet a condition."""
        removed = [sample for sample in self.waiting if condition(sample)]
        self.waiting = deque(sample for sample in self.waiting if not condition(sample))
        return removed

    def next_prefixes(self, num_running: int) -> list[Prefix]:
        """Remove the samples that join now from the queue, grouped by prefix."""
        num_free = self._max_num_sequences - num_running
        if not self.waiting or (num_running and num_free < self._min_free):
            return []
        groups: list[list[Sample]] = []
        for _ in range(min(num_free, len(self.waiting))):
            sample = self.waiting.popleft()
            if groups and _share_prefix(groups[-1][0], sample):
                groups[-1].append(sample)
            else:
                groups.append([sample])
        return [
            Prefix([*group[0].request.prompt_ids, *group[0].token_ids], tuple(group))
            for group in groups
        ]


def prefill_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into chunks of padded size (count x longest) `max_tokens`; return indices.

    Chunks hold similar lengths; a sequence above the budget is a chunk of its own.
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if chunks and (len(chunks[-1]) + 1) * lengths[index] <= max_tokens:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def fill_holes(num_rows: int, leaving: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """Compute how the last rows of a batch move into the places of leaving ones.

    Returns the old row at each new place; the rows that move; the places they move to.
    """
    num_left = num_rows - len(leaving)
    holes = sorted(row for row in leaving if row < num_left)
    movers = [row for row in range(num_left, num_rows) if row not in leaving]
    moved = dict(zip(holes, movers, strict=True))
    return [moved.get(place, place) for place in range(num_left)], movers, holes


def _share_prefix(first: Sample, other: Sample) -> bool:
    return first.request is other.request and not first.token_ids and not other.token_ids
