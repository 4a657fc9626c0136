"""Which samples wait and which join the running batch; plain Python, no tensors.

Promises: first come, first served; samples of one request that join together share one prefill
of their prompt; samples sent back by a weight update go first and keep their order; what joins
together fits the token budget of a prefill, padding counted, unless it is one long prompt.
Nothing here influences what is sampled: a sample's randomness comes from its seed alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from engines.types import Completion, RolloutRequest


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request, waiting or running.

    Attributes:
        request: the request it belongs to.
        index: which of the request's seeds it uses.
        call: identifies the call of `generate` that waits for it.
        max_new_tokens: tokens after which it is finished.
        token_ids: tokens sampled so far.
        logprobs: their logprobs.
        versions: policy versions of the first tokens; the current version sampled the rest.
    """

    request: RolloutRequest
    index: int
    call: int
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens together."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    def stamp(self, version: int) -> None:
        """Note `version` as the one that sampled every token without a note."""
        self.versions.extend([version] * (len(self.token_ids) - len(self.versions)))

    def completion(self, finish_reason: str, version: int) -> Completion:
        """The finished sample; `version` sampled the tokens without a note."""
        self.stamp(version)
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            policy_versions=tuple(self.versions),
            finish_reason=finish_reason,
        )


@dataclass(frozen=True)
class Prefix:
    """Tokens to prefill once, and the samples that continue them.

    Attributes:
        token_ids: the prompt, and for a sample that was sent back what it had sampled.
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
