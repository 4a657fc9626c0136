"""Pool of scoring processes with a hard deadline per sample.

Promises: a batch yields one result per request and is worked on while requests are added. A sample
that hangs, crashes its process or floods its reply is `Unscored`; others are not affected. A
process past its deadline is killed with its process group. No process outlives the pool.
One batch at a time, called from one thread. Not a sandbox: a child in a new session survives.
"""

import logging
import os
import selectors
import threading
import weakref
from collections import deque
from collections.abc import Sequence

from engines.errors import RewardError
from engines.rewards.base import Form, Score, ScoreRequest, Unscored
from engines.rewards.process import ScoringProcess, WorkerSetup
from infra.errors import DeadlineError

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_THREAD_DEADLINE_S = 60.0
"""For the thread's last turn, which may kill a process and start another."""
_WORTH = 2.0
"""Start another process if the remaining work exceeds its start time by this factor."""


class ScoringPool:
    """Scoring processes; `min_workers` start at once (None: all), others when `worth_another`."""

    def __init__(
        self, setup: WorkerSetup, max_workers: int, min_workers: int | None = None
    ) -> None:
        self._setup = setup
        self._max_workers = max_workers
        self._min_workers = max_workers if min_workers is None else min_workers
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._processes: list[ScoringProcess] = []
        self._open: PoolBatch | None = None
        self._finalizer = weakref.finalize(self, _end, self._processes, self._selector, self._wake)
        for _ in range(self._min_workers):
            self._processes.append(ScoringProcess(setup, self._selector))

    def batch(self) -> "PoolBatch":
        """Begin an empty batch; RewardError if the pool is closed or has an open batch."""
        if not self._finalizer.alive:
            raise RewardError("the scoring pool is closed")
        if self._open is not None:
            raise RewardError("the scoring pool has a batch that has not ended")
        self._open = PoolBatch(self)
        return self._open

    @property
    def form(self) -> Form:
        """Form of the function; `sample`, which sees most, until a process has reported it."""
        for process in self._processes:
            if process.form is not None:
                return process.form
        return "sample"

    def close(self) -> None:
        """End every process and an open batch; callable repeatedly."""
        if self._open is not None:
            self._open.close()
        self._finalizer()

    def _turn(self, batch: "PoolBatch") -> None:
        """Replace failed processes, submit requests, wait a moment, and collect results."""
        for place, process in reversed(list(enumerate(self._processes))):
            failure = process.failure()
            batch.found.update(process.take_results())
            if failure is not None:
                self._replace(place, failure, batch)
        for process in self._processes:
            if process.is_idle and batch.waiting:
                process.submit(*batch.waiting.popleft())
        self._start_more(len(batch.waiting))
        wait_s = min(process.seconds_left() for process in self._processes)
        for key, events in self._selector.select(max(0.0, min(wait_s, _POLL_S))):
            process: ScoringProcess | None = key.data
            if process is None:
                os.eventfd_read(self._wake)
                continue
            if events & selectors.EVENT_WRITE:
                process.write()
            if events & selectors.EVENT_READ:
                process.read()
        for process in self._processes:
            batch.found.update(process.take_results())

    def _start_more(self, num_waiting: int) -> None:
        while len(self._processes) < self._max_workers and worth_another(
            self._processes, num_waiting
        ):
            try:
                self._processes.append(ScoringProcess(self._setup, self._selector))
            except OSError as error:
                self._go_on_without(str(error))

    def _go_on_without(self, failure: str) -> None:
        """Keep the current number of processes: a further one would only save time."""
        self._max_workers = len(self._processes)
        logger.warning("scoring processes: going on with %d; %s", self._max_workers, failure)

    def _replace(self, place: int, failure: str, batch: "PoolBatch") -> None:
        process = self._processes[place]
        if not process.was_ready and place >= self._min_workers:
            process.kill()
            del self._processes[place]
            self._go_on_without(f"a further one did not start: {failure}")
            return
        if not process.was_ready:
            raise RewardError(f"the reward function cannot be loaded: {failure}")
        if process.index is not None:
            batch.found[process.index] = Unscored(failure)
        process.kill()
        self._processes[place] = ScoringProcess(self._setup, self._selector)


class PoolBatch:
    """Requests that a thread judges from the first one on; after `results`, the caller does."""

    def __init__(self, pool: ScoringPool) -> None:
        self._pool = pool
        self._num_added = 0
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._error: BaseException | None = None
        self.waiting: deque[tuple[int, ScoreRequest]] = deque()
        self.found: dict[int, Score | Unscored] = {}

    def add(self, request: ScoreRequest) -> int:
        """Submit a request; return its number: 0, 1, ...

        Raises:
            RewardError: the function cannot be loaded, or a process does not start.
        """
        self._raise_error()
        if self._pool._open is not self:
            raise RewardError("the batch has ended")
        number = self._num_added
        self._num_added += 1
        self.waiting.append((number, request))
        if self._thread is None:
            # A daemon thread, so that a batch that is never ended does not keep the process alive.
            self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
            self._thread.start()
        os.eventfd_write(self._pool._wake, 1)
        return number

    def results(self) -> list[Score | Unscored]:
        """Wait for all results, end the batch, and return them by number; raises as `add`."""
        if self._pool._open is not self:
            raise RewardError("the batch has ended")
        try:
            self._stop()
            self._raise_error()
            while len(self.found) < self._num_added:
                self._pool._turn(self)
        except BaseException:
            self.close()
            raise
        self._pool._open = None
        return [self.found[number] for number in range(self._num_added)]

    def close(self) -> None:
        """End the batch, and the pool unless all is judged: late replies must not mix."""
        if self._pool._open is not self:
            return
        self._pool._open = None
        try:
            self._stop()
        finally:
            if self._error is not None or len(self.found) < self._num_added:
                self._pool._finalizer()

    def _work(self) -> None:
        try:
            while not self._stopped:
                self._pool._turn(self)
        except BaseException as error:  # noqa: BLE001 - thread boundary: raised in the caller's
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        self._stopped = True
        if self._thread is not None:
            os.eventfd_write(self._pool._wake, 1)
            self._thread.join(_THREAD_DEADLINE_S)
            if self._thread.is_alive():
                raise DeadlineError("the scoring thread to end", _THREAD_DEADLINE_S)


def worth_another(processes: Sequence[ScoringProcess], num_waiting: int) -> bool:
    """Return True if a further process would save more time than it takes to start."""
    start_s = max((process.start_s or 0.0 for process in processes), default=0.0)
    num_timed = sum(max(0, process.num_judged - 1) for process in processes)
    request_s = sum(process.timed_s for process in processes) / max(1, num_timed)
    return 0.0 < _WORTH * start_s < num_waiting * request_s / len(processes)


def _end(processes: list[ScoringProcess], selector: selectors.BaseSelector, wake: int) -> None:
    for process in processes:
        process.kill()
    processes.clear()
    selector.close()
    os.close(wake)
