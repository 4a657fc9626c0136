"""Score batches of completions with the configured reward function.

Functions that take microseconds run in this process, others in a pool of processes of their own.
Promises: one result per sample, in order. A sample that could not be scored is `Unscored` with a
reason, never 0; too many of those stop the run. Samples are judged as they are added. In the
pool, a sample that hangs past its deadline, crashes its process or floods its reply does not affect
others; a process past its deadline is killed with its process group, and none outlives the pool.
With `cache_size`, scores of one stage are kept by a digest of what the function sees of a sample;
unscored samples are not kept.
Does not promise: that a cached function is deterministic; a sandbox: a child in a new session
survives. The pool has one batch at a time, for one thread.
"""

import hashlib
import json
import logging
import os
import selectors
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards.base import (
    Form,
    Judging,
    Score,
    ScoreRequest,
    Unscored,
    describe,
    form_of,
    judge,
)
from engines.rewards.process import ScoringProcess, WorkerSetup, message_of
from engines.rewards.resolve import load, resolve
from infra.errors import DeadlineError

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_THREAD_DEADLINE_S = 60.0
"""Deadline of the thread's last turn, which may kill a process and start another."""
_WORTH = 2.0
"""Start another process if the remaining work exceeds its start time by this factor."""


class RewardScorer(AbstractContextManager["RewardScorer"]):
    """Scores samples with the recipe's reward; a context manager, which ends its pool, if any.

    Raises:
        ConfigError: the function, its file or an option does not exist.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._cache = ScoreCache(config.cache_size) if config.cache_size else None
        reward = resolve(config)
        row = reward.function
        self._pool: ScoringPool | None = None
        if row.in_process:
            function = load(row.target)
            self._form: Form = form_of(function)
            self._judge = partial(judge, function, self._form, kwargs=reward.kwargs)
        else:
            setup = WorkerSetup(
                row.target, reward.kwargs, config.timeout_s,
                row.memory_limit_bytes, config.environment,
            )  # fmt: skip
            num_workers = config.num_workers or min(len(os.sched_getaffinity(0)), 16)
            self._pool = ScoringPool(setup, num_workers, config.num_workers or 1)

    def score(self, samples: Sequence[ScoreRequest]) -> list[Score | Unscored]:
        """Score all samples of one step, in order; raises as `ScoringBatch.results`."""
        with self.batch() as batch:
            for place, sample in enumerate(samples):
                batch.add(place, sample)
            return batch.results(range(len(samples)))

    def batch(self) -> "ScoringBatch":
        """Begin an empty batch; RewardError if the pool has one that has not ended."""
        judging: Judging
        judging = self._pool.batch() if self._pool else JudgingHere(self._judge)
        if self._cache is not None:
            # Fixed for the batch: otherwise equal samples could get different cache keys.
            form = self._pool.form if self._pool else self._form
            judging = CachedJudging(self._cache, form, judging)
        return ScoringBatch(judging, self._config.max_unscored_frac)

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.close()


class ScoreCache(OrderedDict[bytes, Score]):
    """LRU cache of at most `size` scores by digest; `keep` adds to it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def keep(self, key: bytes, result: Score | Unscored) -> None:
        """Store a score as the most recently used one; an `Unscored` is not stored."""
        if isinstance(result, Score):
            self[key] = result
            self.move_to_end(key)
        if len(self) > self._size:
            self.popitem(last=False)


class CachedJudging:
    """Passes on only requests without a cached score, each once; `form` sets which fields count."""

    def __init__(self, cache: ScoreCache, form: Form, judging: Judging) -> None:
        self._cache, self._judging = cache, judging
        self._form: Form = form
        self._keys: list[bytes] = []
        self._found: dict[bytes, Score | int] = {}
        """A known score, or the number of the request that was passed on."""

    def add(self, request: ScoreRequest) -> int:
        """See `Judging`."""
        message = json.dumps(message_of(request, self._form), sort_keys=True)
        key = hashlib.sha256(message.encode()).digest()
        self._keys.append(key)
        if key not in self._found:
            known = self._cache.get(key)
            self._found[key] = self._judging.add(request) if known is None else known
        return len(self._keys) - 1

    def results(self) -> list[Score | Unscored]:
        """See `Judging`."""
        judged = self._judging.results()
        found = {
            key: judged[each] if isinstance(each, int) else each
            for key, each in self._found.items()
        }
        for key, result in found.items():
            self._cache.keep(key, result)
        return [found[key] for key in self._keys]

    def close(self) -> None:
        """See `Judging`."""
        self._judging.close()


class JudgingHere:
    """Judges each request in this process when it is added; an exception leaves it unscored."""

    def __init__(self, judge: Callable[[ScoreRequest], Score | Unscored]) -> None:
        self._judge = judge
        self._results: list[Score | Unscored] = []

    def add(self, request: ScoreRequest) -> int:
        """See `Judging`."""
        try:
            self._results.append(self._judge(request))
        except Exception as error:  # noqa: BLE001 - boundary to a plugin: one sample, reported
            self._results.append(Unscored(describe(error)))
        return len(self._results) - 1

    def results(self) -> list[Score | Unscored]:
        """See `Judging`."""
        return self._results

    def close(self) -> None:
        """See `Judging`; does nothing."""


class ScoringBatch(AbstractContextManager["ScoringBatch"]):
    """The samples of one step, judged as they are added; a context manager, for one thread."""

    def __init__(self, judging: Judging, max_unscored_frac: float) -> None:
        self._judging = judging
        self._max_unscored_frac = max_unscored_frac
        self._numbers: dict[Hashable, int] = {}

    def add(self, key: Hashable, sample: ScoreRequest) -> None:
        """Submit a sample; it replaces an earlier one with the same `key`."""
        self._numbers[key] = self._judging.add(sample)

    def results(self, keys: Sequence[Hashable]) -> list[Score | Unscored]:
        """Wait for all results, end the batch, and return one result per key, in order.

        `keys` are all samples of the step, over which the share of unscored ones is computed.

        Raises:
            RewardError: the function cannot be loaded, or more than `max_unscored_frac` of the
                samples could not be scored.
        """
        found = self._judging.results()
        results = [found[self._numbers[key]] for key in keys]
        check_unscored(results, self._max_unscored_frac)
        return results

    def __exit__(self, *exception: object) -> None:
        """End the batch; if a sample is not judged yet, also the pool's processes."""
        self._judging.close()


def check_unscored(results: Sequence[Score | Unscored], max_unscored_frac: float) -> None:
    """Raise RewardError if the share of unscored samples is above `max_unscored_frac`."""
    reasons = Counter(result.reason for result in results if isinstance(result, Unscored))
    num_unscored = reasons.total()
    if num_unscored > max_unscored_frac * len(results):
        shown = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3))
        raise RewardError(
            f"{num_unscored} of {len(results)} samples could not be scored, more than "
            f"rl.reward.max_unscored_frac = {max_unscored_frac:g}: {shown}"
        )


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
        known: list[Form] = [each.form for each in self._processes if each.form is not None]
        return known[0] if known else "sample"

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
        while len(self._processes) < self._max_workers and worth_another(
            self._processes, len(batch.waiting)
        ):
            try:
                self._processes.append(ScoringProcess(self._setup, self._selector))
            except OSError as error:
                self._go_on_without(str(error))
        wait_s = min(_POLL_S, *(process.seconds_left() for process in self._processes))
        for key, events in self._selector.select(max(0.0, wait_s)):
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

    def _go_on_without(self, failure: str) -> None:
        """Keep the current number of processes: a further one would only save time."""
        self._max_workers = len(self._processes)
        logger.warning("scoring processes: going on with %d; %s", self._max_workers, failure)

    def _replace(self, place: int, failure: str, batch: "PoolBatch") -> None:
        process = self._processes[place]
        if process.form is None and place >= self._min_workers:
            process.kill()
            del self._processes[place]
            self._go_on_without(f"a further one did not start: {failure}")
            return
        if process.form is None:
            raise RewardError(f"the reward function cannot be loaded: {failure}")
        if process.index is not None:
            batch.found[process.index] = Unscored(failure)
        process.kill()
        self._processes[place] = ScoringProcess(self._setup, self._selector)


class PoolBatch:
    """A batch of the pool; a thread works on it until `results`, then the caller of `results`."""

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
            RewardError: the function cannot be loaded, or the batch has ended.
        """
        self._check_open()
        self.waiting.append((self._num_added, request))
        self._num_added += 1
        if self._thread is None:
            # A daemon thread, so that a batch that is never ended does not keep the process alive.
            self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
            self._thread.start()
        os.eventfd_write(self._pool._wake, 1)
        return self._num_added - 1

    def results(self) -> list[Score | Unscored]:
        """Wait for all results, end the batch, and return them by number; raises as `add`."""
        try:
            self._check_open()
            self._stop()
            self._check_open()
            while len(self.found) < self._num_added:
                self._pool._turn(self)
        finally:
            self.close()
        return [self.found[number] for number in range(self._num_added)]

    def close(self) -> None:
        """End the batch; also the pool if a reply is missing, which would reach the next batch."""
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

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._pool._open is not self:
            raise RewardError("the batch has ended")

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
