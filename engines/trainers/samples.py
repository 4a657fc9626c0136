"""What scoring hands to the RL loop; apart from it, so that scoring knows no algorithm."""

from dataclasses import dataclass

from engines.types import Completion


@dataclass(frozen=True)
class ScoredSample:
    """One completion with its prompt and score.

    Attributes:
        group: index of its prompt within the RL step.
        prompt_ids: the prompt.
        completion: what was sampled.
        score: what the reward function gave.
        reward: the score with its shaping (overlong punishment): what advantages are made of.
    """

    group: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    score: float
    reward: float


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
