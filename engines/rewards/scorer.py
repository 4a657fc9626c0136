"""Scores batches of completions with the configured reward function.

Promises: one result per sample, in order; a sample that could not be scored is `Unscored` with a
reason and never 0; too many of those stop the run. `exact` costs microseconds a sample, in this
process; every other function runs in processes of its own, under a deadline per sample.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Self

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards.base import ComputeScore, Score, ScoreRequest, Unscored, describe
from engines.rewards.cache import ScoreCache
from engines.rewards.forms import Form, form_of, judge
from engines.rewards.pool import ScoringPool
from engines.rewards.process import WorkerSetup
from engines.rewards.resolve import load, resolve

_SHOWN_REASONS = 3


class RewardScorer:
    """The reward of a run; a context manager. Its processes start when it is created.

    Args:
        config: the function, its options and limits.

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
            self._pool = ScoringPool(setup, config.num_workers)

    def score(self, samples: Sequence[ScoreRequest]) -> list[Score | Unscored]:
        """Score the samples of one step.

        Args:
            samples: all of the step's, since the share of unscored ones is judged over them.

        Returns:
            One result per sample, in order.

        Raises:
            RewardError: the function cannot be loaded, or more than `max_unscored_frac` of the
                samples could not be scored.
        """
        if self._cache is not None:
            form = self._form if self._pool is None else self._pool.form
            results = self._cache.score(samples, form, self._judge)
        else:
            results = self._judge(samples)
        check_unscored(results, self._config.max_unscored_frac)
        return results

    def close(self) -> None:
        """End the scoring processes. May be called twice."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _judge(self, samples: Sequence[ScoreRequest]) -> list[Score | Unscored]:
        if self._pool is not None:
            return self._pool.score(samples)
        return [self._score_here(sample) for sample in samples]

    def _score_here(self, sample: ScoreRequest) -> Score | Unscored:
        assert self._function is not None  # noqa: S101 - no pool means a function
        try:
            return judge(self._function, self._form, sample, self._kwargs)
        except Exception as error:  # noqa: BLE001 - boundary to a plugin: one sample, reported
            return Unscored(describe(error))


def check_unscored(results: Sequence[Score | Unscored], max_unscored_frac: float) -> None:
    """Stop a run whose reward is broken rather than train on what is left.

    Args:
        results: of one step.
        max_unscored_frac: largest share of unscored samples.

    Raises:
        RewardError: the share is larger; counts the most frequent reasons.
    """
    reasons = Counter(result.reason for result in results if isinstance(result, Unscored))
    num_unscored = reasons.total()
    if num_unscored <= max_unscored_frac * len(results):
        return
    shown = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(_SHOWN_REASONS))
    raise RewardError(
        f"{num_unscored} of {len(results)} samples could not be scored, more than "
        f"rl.reward.max_unscored_frac = {max_unscored_frac:g}: {shown}"
    )
