"""Collects the answers (samples or logprobs) to a batch and accepts each exactly once.

Promises: answers in the order of the requests and their seeds. A sample that arrives again, because
it was also requested from another replica, is dropped. A sample that was not requested, or that one
engine delivers twice, is an error.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from engines.errors import RolloutError
from engines.rollout.base import RolloutEngine
from engines.rollout.prompt_logprobs import PromptLogprobs, PromptRequest
from engines.types import Completion, RolloutRequest
from infra.errors import DeadlineError

Request = TypeVar("Request", RolloutRequest, PromptRequest)
Receive = Callable[[Completion], None]


class Ledger(ABC, Generic[Request]):
    """Records which answers of a batch arrived; raises RolloutError if two requests share an id."""

    def __init__(self, requests: Sequence[Request]) -> None:
        if len({request.request_id for request in requests}) != len(requests):
            raise RolloutError("two requests of one batch have the same id")

    @abstractmethod
    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that are incomplete, reduced to their missing answers."""

    @abstractmethod
    async def collect_share(self, engine: RolloutEngine, requests: Sequence[Request]) -> None:
        """Have one engine answer requests with distinct ids, and record the answers.

        Raises:
            RolloutError: a refused request, or a missing, doubled or unrequested answer.
        """


class SampleLedger(Ledger[RolloutRequest]):
    """Records samples in an event loop; another thread passes finished samples to `receive`.

    Attributes:
        refused: `receive` raised an error, or is running.
        over: set when the event loop has stopped working on the batch.
    """

    def __init__(self, requests: Sequence[RolloutRequest], receive: Receive | None = None) -> None:
        super().__init__(requests)
        self._receive = receive
        self._arrived: deque[Completion] = deque()
        self._wanted = [request.sample_keys for request in requests]
        self._found: dict[tuple[str, int], Completion] = {}
        self.refused, self.over = False, threading.Event()

    @property
    def num_missing(self) -> int:
        """Number of samples not yet accepted."""
        return sum(map(len, self._wanted)) - len(self._found)

    def accept(self, completion: Completion) -> None:
        """Record a sample, unless it is recorded already."""
        key = completion.request_id, completion.sample_index
        if key not in self._found:
            self._found[key] = completion
            if completion.finish_reason != "abort":
                self._arrived.append(completion)

    def hand_over(self) -> None:
        """Pass newly finished samples to `receive`, in this thread; propagates its errors."""
        while self._receive is not None and self._arrived:
            self.refused = True
            self._receive(self._arrived.popleft())
            self.refused = False

    def missing(self, requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
        """See `Ledger`."""
        left = (
            request.select(key[1] for key in request.sample_keys if key not in self._found)
            for request in requests
        )
        return [request for request in left if request.num_samples]

    async def collect_share(
        self, engine: RolloutEngine, requests: Sequence[RolloutRequest]
    ) -> None:
        """See `Ledger`."""
        wanted = {key for request in requests for key in request.sample_keys}
        found: list[tuple[str, int]] = []
        async for completion in engine.generate(requests):
            found.append((completion.request_id, completion.sample_index))
            if found[-1] in wanted:
                self.accept(completion)
        if len(found) != len(wanted) or set(found) != wanted:
            raise RolloutError(
                f"asked for {len(wanted)} samples, got {len(found)}; need each requested one once"
            )

    def abort_missing(self) -> int:
        """Record missing samples as aborted without tokens; return how many samples finished."""
        for key in chain.from_iterable(self._wanted):
            self.accept(Completion(*key, (), (), (), "abort"))
        return sum(found.finish_reason != "abort" for found in self._found.values())

    def rows(self) -> list[list[Completion]]:
        """Return the completions of each request, in the order of its seeds."""
        return [[self._found[key] for key in keys] for keys in self._wanted]


class PromptLedger(Ledger[PromptRequest]):
    """Records which prompt logprobs of a batch arrived; each request has one answer."""

    def __init__(self, requests: Sequence[PromptRequest]) -> None:
        super().__init__(requests)
        self._wanted = [request.request_id for request in requests]
        self._found: dict[str, PromptLogprobs] = {}

    def missing(self, requests: Iterable[PromptRequest]) -> list[PromptRequest]:
        """See `Ledger`."""
        return [request for request in requests if request.request_id not in self._found]

    async def collect_share(self, engine: RolloutEngine, requests: Sequence[PromptRequest]) -> None:
        """See `Ledger`."""
        answers = await engine.prompt_logprobs(requests)
        if [each.request_id for each in requests] != [each.request_id for each in answers]:
            raise RolloutError(
                f"asked about {len(requests)} sequences, got {len(answers)} answers; need one for "
                "each, in order"
            )
        self._found |= {answer.request_id: answer for answer in answers}

    def rows(self) -> list[PromptLogprobs]:
        """Return the answer to each request, in their order."""
        return [self._found[request_id] for request_id in self._wanted]


async def collect(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float
) -> list[list[Completion]]:
    """Have one engine sample every request, and return the completions of each by seed.

    Raises:
        RolloutError: as `Ledger.collect_share`; or two requests have the same id.
        DeadlineError: samples are unfinished after `timeout_s`.
    """
    ledger = SampleLedger(requests)
    try:
        async with asyncio.timeout(timeout_s):
            await ledger.collect_share(engine, requests)
    except TimeoutError:
        raise DeadlineError(f"{ledger.num_missing} samples", timeout_s) from None
    return ledger.rows()
