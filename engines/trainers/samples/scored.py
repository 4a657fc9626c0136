"""What scoring hands to the RL loop; apart from it, so that scoring knows no algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.trajectory import Trajectory


@dataclass(frozen=True)
class ScoredSample:
    """One trajectory with its score.

    Attributes:
        group: index of its prompt within the RL step.
        trajectory: what was sampled.
        score: what the reward function gave.
        reward: the score with its shaping (overlong punishment): what advantages are made of.
        extras: what else the reward function reported, by name.
        correct: a right answer.
        greedy_reward: of the greedy answer to the same prompt, where the estimator reads it.
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
    """What became of one generation batch.

    Attributes:
        samples: those that were scored.
        num_generated: completions that were sampled.
        num_unscored: completions that could not be scored.
        num_aborted: completions whose sampling was aborted; not scored.
    """

    samples: tuple[ScoredSample, ...]
    num_generated: int
    num_unscored: int
    num_aborted: int
