"""Scored samples for the RL loop; separate from it, so that scoring imports no algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.trajectory import Trajectory


@dataclass(frozen=True)
class ScoredSample:
    """One trajectory with its score; `group` is the index of its prompt within the RL step.

    Advantages use `reward`: the score plus shaping (overlong penalty). `extras` has other values of
    the reward function; `greedy_reward` is for estimators that read it.
    """

    group: int
    trajectory: Trajectory
    score: float
    reward: float
    extras: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False
    greedy_reward: float | None = None


@dataclass(frozen=True)
class ScoredBatch:
    """The scored samples of one generation batch, and counts of its completions.

    Aborted completions are not scored, and not counted in `num_unscored`.
    """

    samples: tuple[ScoredSample, ...]
    num_generated: int
    num_unscored: int
    num_aborted: int
