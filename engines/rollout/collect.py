"""The samples of a batch of requests, each accepted once, wherever and how often it was sampled.

Promises: every sample of every request, in the order of the requests and their seeds, whatever
finished first; a sample that comes again, because another replica was asked for it too, is
dropped; one that nobody asked for, or that one engine gives twice, is an error.
Does not know: replicas, or why something is sampled again.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engines.errors import RolloutError
from engines.rollout.base import RolloutEngine
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError


@dataclass(frozen=True)
class Part:
    """Some samples of a request, for one replica.

    Attributes:
        request: the whole request.
        samples: which of its samples, by index.
    """

    request: RolloutRequest
    samples: tuple[int, ...]

    @staticmethod
    def whole(request: RolloutRequest) -> "Part":
        """Every sample of a request."""
        return Part(request, tuple(range(request.num_samples)))

    def asked(self) -> RolloutRequest:
        """The request as a replica gets it: with the seeds of these samples alone."""
        return replace(self.request, seeds=tuple(self.request.seeds[i] for i in self.samples))


class SampleLedger:
    """Which samples of a batch are there.

    Args:
        requests: the batch; the ids must differ.

    Raises:
        RolloutError: two requests have one id.
    """

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._requests = tuple(requests)
        self._found: dict[str, dict[int, Completion]] = {r.request_id: {} for r in requests}
        if len(self._found) != len(self._requests):
            raise RolloutError("two requests of one batch have the same id")

    @property
    def num_found(self) -> int:
        """Samples that were accepted."""
        return sum(len(found) for found in self._found.values())

    @property
    def num_completed(self) -> int:
        """Samples that were not aborted."""
        everything = (c for found in self._found.values() for c in found.values())
        return sum(completion.finish_reason != "abort" for completion in everything)

    @property
    def num_missing(self) -> int:
        """Samples that were not yet accepted."""
        return sum(request.num_samples for request in self._requests) - self.num_found

    def accept(self, completion: Completion) -> None:
        """Take a sample, unless it is there already; indices are those of the whole request."""
        self._found[completion.request_id].setdefault(completion.sample_index, completion)

    def missing(self, parts: Iterable[Part]) -> list[Part]:
        """What of these parts is not there; a part that is complete is left out."""
        left = [
            replace(
                part,
                samples=tuple(
                    index
                    for index in part.samples
                    if index not in self._found[part.request.request_id]
                ),
            )
            for part in parts
        ]
        return [part for part in left if part.samples]

    def abort_missing(self) -> None:
        """Take every missing sample for aborted before its first token."""
        for part in self.missing(Part.whole(request) for request in self._requests):
            for index in part.samples:
                self.accept(Completion(part.request.request_id, index, (), (), (), "abort"))

    def rows(self) -> list[list[Completion]]:
        """For each request its completions, in the order of its seeds; none may be missing."""
        return [
            [self._found[request.request_id][index] for index in range(request.num_samples)]
            for request in self._requests
        ]


async def collect_parts(engine: RolloutEngine, parts: Sequence[Part], ledger: SampleLedger) -> None:
    """Have one engine sample some parts, and enter what comes.

    Args:
        engine: the engine.
        parts: of different requests.
        ledger: that knows their requests.

    Raises:
        RolloutError: the engine refused a request, or lost, doubled or made up a sample.
    """
    wanted = {
        (part.request.request_id, place): index
        for part in parts
        for place, index in enumerate(part.samples)
    }
    num_wanted = num_found = len(wanted)
    async for completion in engine.generate([part.asked() for part in parts]):
        index = wanted.pop((completion.request_id, completion.sample_index), None)
        if index is None:
            num_found += 1
        else:
            ledger.accept(replace(completion, sample_index=index))
    num_found -= len(wanted)
    if wanted or num_found != num_wanted:
        raise RolloutError(f"asked for {num_wanted} samples, got {num_found}, not the same")


async def collect(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float
) -> list[list[Completion]]:
    """Have one engine sample every request, and wait for all of it.

    Args:
        engine: the engine.
        requests: what to sample; the ids must differ.
        timeout_s: deadline of the whole batch, beside the engine's own.

    Returns:
        For each request its completions, in the order of its seeds.

    Raises:
        RolloutError: as `collect_parts`.
        DeadlineError: samples are unfinished at the deadline.
    """
    ledger = SampleLedger(requests)
    try:
        async with asyncio.timeout(timeout_s):
            await collect_parts(engine, [Part.whole(request) for request in requests], ledger)
    except TimeoutError:
        raise DeadlineError(f"{ledger.num_missing} samples", timeout_s) from None
    return ledger.rows()
