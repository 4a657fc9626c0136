"""Scoring processes with a hard deadline per sample.

Promises: `score` returns one result per request whatever the function does; a sample that hangs,
crashes its process or floods its reply is `Unscored`, and the others are not touched; a process
past its deadline is killed with its process group; at most `num_workers` processes exist, and
none after `close` (or when the pool is garbage-collected, or the interpreter ends).
Not a sandbox: no protection against code that means harm (a child in a new session survives).
"""

import selectors
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from engines.errors import RewardError
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.forms import Form
from engines.rewards.process import ScoringProcess, WorkerSetup

_POLL_S = 0.2


class ScoringPool:
    """Scoring processes; started at once, so that their imports overlap other work.

    Args:
        setup: the function and its limits.
        num_workers: processes.
    """

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._processes: list[ScoringProcess] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, self._selector)
        for _ in range(num_workers):
            self._processes.append(ScoringProcess(setup, self._selector))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Unscored]:
        """Score every request; blocks until the last result, in the order of the requests.

        Args:
            requests: any number.

        Returns:
            One result per request.

        Raises:
            RewardError: the function cannot be loaded, or a process does not start.
        """
        with self._lock:
            if not self._finalizer.alive:
                raise RewardError("the scoring pool is closed")
            batch = _Batch(requests)
            try:
                while batch.num_open:
                    self._turn(batch)
            except BaseException:
                # A process may hold a request of this batch; its reply must not meet the next one.
                self._finalizer()
                raise
            return batch.results()

    @property
    def form(self) -> Form:
        """Of the function; until a process has said it, the one that sees most."""
        for process in self._processes:
            if process.form is not None:
                return process.form
        return "sample"

    def close(self) -> None:
        """End every process. May be called twice."""
        with self._lock:
            self._finalizer()

    def _turn(self, batch: "_Batch") -> None:
        """Hand out work, wait a moment, take in what happened."""
        for process in self._processes:
            if process.is_idle and batch.waiting:
                index = batch.waiting.popleft()
                process.submit(index, batch.requests[index])
        wait_s = min(process.seconds_left() for process in self._processes)
        for key, events in self._selector.select(max(0.0, min(wait_s, _POLL_S))):
            process: ScoringProcess = key.data
            if events & selectors.EVENT_WRITE:
                process.write()
            if events & selectors.EVENT_READ:
                process.read()
        for place, process in enumerate(self._processes):
            failure = process.failure()
            for index, result in process.take_results():
                batch.set(index, result)
            if failure is not None:
                self._replace(place, failure, batch)

    def _replace(self, place: int, failure: str, batch: "_Batch") -> None:
        process = self._processes[place]
        if not process.was_ready:
            raise RewardError(f"the reward function cannot be loaded: {failure}")
        if process.index is not None:
            batch.set(process.index, Unscored(failure))
        process.kill()
        self._processes[place] = ScoringProcess(self._setup, self._selector)


class _Batch:
    """Requests, those still waiting for a process, and the results so far."""

    def __init__(self, requests: Sequence[ScoreRequest]) -> None:
        self.requests = requests
        self.waiting = deque(range(len(requests)))
        self.num_open = len(requests)
        self._results: list[Score | Unscored | None] = [None] * len(requests)

    def set(self, index: int, result: Score | Unscored) -> None:
        self._results[index] = result
        self.num_open -= 1

    def results(self) -> list[Score | Unscored]:
        return [result for result in self._results if result is not None]


def _kill_all(processes: list[ScoringProcess], selector: selectors.BaseSelector) -> None:
    for process in processes:
        process.kill()
    processes.clear()
    selector.close()
