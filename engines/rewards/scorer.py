"""Score batches of completions with the configured reward function.

Promises: one result per sample, in order. A sample that could not be scored is `Unscored` with a
reason, never 0; too many of those stop the run. A batch is judged while its samples come. Functions
that take microseconds run in this process, others in processes of their own with a deadline.

Cache of scores for one stage, keyed by a digest of what the function sees of a sample.

Unscored samples are not kept. Assumes that the function is deterministic.
"""

import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Self

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards.base import (
    ComputeScore,
    Form,
    Judging,
    Score,
    ScoreRequest,
    Unscored,
    describe,
    form_of,
    judge,
)
from engines.rewards.pool import ScoringPool
from engines.rewards.process import WorkerSetup, message_of
from engines.rewards.resolve import load, resolve


class ScoreCache:
    """LRU cache of at most `size` scores."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: OrderedDict[bytes, Score] = OrderedDict()

    def find(self, key: bytes) -> Score | None:
        """Return the score with this digest, or None."""
        return self._scores.get(key)

    def keep(self, key: bytes, result: Score | Unscored) -> None:
        """Record a use of this digest; only a `Score` is stored."""
        if not isinstance(result, Score):
            return
        self._scores[key] = result
        self._scores.move_to_end(key)
        if len(self._scores) > self._size:
            self._scores.popitem(last=False)


class CachedJudging:
    """Judging that passes on only unknown requests, equal ones (by `form`) once."""

    def __init__(self, cache: ScoreCache, form: Form, judging: Judging) -> None:
        self._cache, self._judging = cache, judging
        self._form: Form = form
        self._keys: list[bytes] = []
        self._known: dict[bytes, Score] = {}
        self._asked: dict[bytes, int] = {}

    def add(self, request: ScoreRequest) -> int:
        """See `Judging`."""
        key = _key(request, self._form)
        self._keys.append(key)
        if key not in self._known and key not in self._asked:
            known = self._cache.find(key)
            if known is None:
                self._asked[key] = self._judging.add(request)
            else:
                self._known[key] = known
        return len(self._keys) - 1

    def results(self) -> list[Score | Unscored]:
        """See `Judging`."""
        judged = self._judging.results()
        found: dict[bytes, Score | Unscored] = {
            **self._known,
            **{key: judged[number] for key, number in self._asked.items()},
        }
        for key in dict.fromkeys(self._keys):
            self._cache.keep(key, found[key])
        return [found[key] for key in self._keys]

    def close(self) -> None:
        """See `Judging`."""
        self._judging.close()


def _key(request: ScoreRequest, form: Form) -> bytes:
    return hashlib.sha256(json.dumps(message_of(request, form), sort_keys=True).encode()).digest()


_SHOWN_REASONS = 3
_MAX_WORKERS = 16
"""Used if the recipe sets no number."""


class JudgingHere:
    """Judges each request in this process when it is added."""

    def __init__(self, judge: Callable[[ScoreRequest], Score | Unscored]) -> None:
        self._judge = judge
        self._results: list[Score | Unscored] = []

    def add(self, request: ScoreRequest) -> int:
        """See `Judging`."""
        self._results.append(self._judge(request))
        return len(self._results) - 1

    def results(self) -> list[Score | Unscored]:
        """See `Judging`."""
        return self._results

    def close(self) -> None:
        """See `Judging`; does nothing."""


class ScoringBatch:
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

    def close(self) -> None:
        """End the batch; also the processes, unless all is judged. Callable repeatedly."""
        self._judging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RewardScorer:
    """The reward of a run; a context manager. Its first process starts when it is created.

    Raises:
        ConfigError: the function, its file or an option does not exist.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        reward = resolve(config)
        function, self._kwargs = reward.function, reward.kwargs
        self._cache = ScoreCache(config.cache_size) if config.cache_size else None
        self._function: ComputeScore | None = None
        self._form: Form = "text"
        self._pool: ScoringPool | None = None
        if function.in_process:
            self._function = load(function.target)
            self._form = form_of(self._function)
        else:
            setup = WorkerSetup(
                function.target, self._kwargs, config.timeout_s,
                function.memory_limit_bytes, config.environment,
            )  # fmt: skip
            num_cores = len(os.sched_getaffinity(0))
            self._pool = ScoringPool(
                setup,
                config.num_workers or min(num_cores, _MAX_WORKERS),
                config.num_workers or 1,
            )

    def score(self, samples: Sequence[ScoreRequest]) -> list[Score | Unscored]:
        """Score all samples of one step, in order; raises as `ScoringBatch.results`."""
        with self.batch() as batch:
            for place, sample in enumerate(samples):
                batch.add(place, sample)
            return batch.results(range(len(samples)))

    def batch(self) -> ScoringBatch:
        """Begin a step whose samples come one by one; RewardError if another one has not ended."""
        # Fixed for the batch: otherwise equal samples could get different cache keys.
        form = self._form if self._pool is None else self._pool.form
        judging: Judging
        judging = JudgingHere(self._score_here) if self._pool is None else self._pool.batch()
        if self._cache is not None:
            judging = CachedJudging(self._cache, form, judging)
        return ScoringBatch(judging, self._config.max_unscored_frac)

    def close(self) -> None:
        """End the scoring processes; callable repeatedly."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _score_here(self, sample: ScoreRequest) -> Score | Unscored:
        assert self._function is not None  # noqa: S101 - no pool means a function
        try:
            return judge(self._function, self._form, sample, self._kwargs)
        except Exception as error:  # noqa: BLE001 - boundary to a plugin: one sample, reported
            return Unscored(describe(error))


def check_unscored(results: Sequence[Score | Unscored], max_unscored_frac: float) -> None:
    """Raise RewardError if the share of unscored samples is above `max_unscored_frac`."""
    reasons = Counter(result.reason for result in results if isinstance(result, Unscored))
    num_unscored = reasons.total()
    if num_unscored <= max_unscored_frac * len(results):
        return
    shown = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(_SHOWN_REASONS))
    raise RewardError(
        f"{num_unscored} of {len(results)} samples could not be scored, more than "
        f"rl.reward.max_unscored_frac = {max_unscored_frac:g}: {shown}"
    )
