"""The queue of samples in front of a running batch.

Promises: first come, first served; what was sent back goes first; samples wait for cache memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from engines.rollout.engine_state import SampleOfCall
from engines.rollout.stop_strings import SampledText
from engines.types import Completion


@dataclass(eq=False, slots=True)
class Sample(SampleOfCall):
    """One sample of a request, waiting or running.

    Attributes:
        token_ids: the prefix, if the request has one, and the tokens sampled so far.
        logprobs: one for each sampled token, without the prefix.
        versions: policy version of each sampled token before the last `stamp`.
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
        """Number of prompt, prefix and sampled tokens."""
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
        return self.is_finished

    @property
    def is_finished(self) -> bool:
        """True if no token follows."""
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


Fits = Callable[[int, int], bool]
"""Whether so many rows, the longest with so many tokens, have room."""


class Scheduler:
    """The queue in front of a batch of at most `max_num_sequences` samples."""

    def __init__(self, max_num_sequences: int) -> None:
        self._max_num_sequences = max_num_sequences
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

    def next_prefixes(self, num_running: int, fits: Fits = lambda *_: True) -> list[Prefix]:
        """Remove the samples that join now from the queue, grouped by prefix.

        An empty batch takes at least one, whether it `fits` or not.
        """
        num_free, num_joining, longest = self._max_num_sequences - num_running, 0, 0
        for sample in islice(self.waiting, num_free):
            longest = max(longest, sample.num_tokens + 1)
            if num_running + num_joining and not fits(num_running + num_joining + 1, longest):
                num_free = num_joining
                break
            num_joining += 1
        # A prefill costs a forward pass of its own whatever its size, so joining one by one
        # would double the number of passes: let an eighth of the batch come together.
        if num_running and num_free < max(1, (num_running + num_free) // 8):
            return []
        joining = [self.waiting.popleft() for _ in range(num_joining)]
        # Samples without tokens share their request's prefix; a sample with tokens has its own.
        alike = groupby(joining, lambda each: id(each if each.token_ids else each.request))
        groups = [tuple(group) for _, group in alike]
        return [
            Prefix([*group[0].request.prompt_ids, *group[0].token_ids], group) for group in groups
        ]
