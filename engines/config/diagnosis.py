"""When a run counts as sick, and what follows from it.

No stage reads any of this, so that none runs anew because of it: a rejected round changes what the
next stage is given, and that input's digest is what tells the stages after it apart.
"""

from typing import Literal

from pydantic import Field, model_validator

from engines.config.base import StrictModel

RoundSymptom = Literal[
    "drift",
    "entropy_collapse",
    "kl_runaway",
    "length_explosion",
    "no_signal",
    "reward_collapse",
    "reward_hacking",
]
"""Symptoms of RL rounds; each is a pure function of what the stages committed."""


class DiagnosisConfig(StrictModel):
    """Thresholds of `rlhf diagnose` and of the page of a run; no stage counts any of them.

    A curve is compared by means over a window: its last one with its first or its best one.
    """

    window_num_steps: int = Field(default=5, ge=1)
    """Steps of a window; a curve of fewer than two windows says nothing."""
    memory_growth: float = Field(default=1.5, gt=1)
    """Peak memory of the last window over that of the first."""
    sync_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of the median step that passes until new weights are served."""
    unnamed_share: float = Field(default=0.3, gt=0, lt=1)
    """Share of the median step in no phase: waiting."""
    entropy_ratio: float = Field(default=0.2, gt=0, lt=1)
    """Entropy of the last window over that of the first, below which it has collapsed; where
    nearly every answer has the best score the task is solved, and that is no collapse."""
    length_growth: float = Field(default=2.0, gt=1)
    """Answers of the last window over those of the first; growth that pays in score is healthy."""
    cut_share: float = Field(default=0.3, gt=0, le=1)
    """Share of answers cut at the limit above which growth in length is no gain."""
    max_kl: float = Field(default=0.5, gt=0)
    """KL to the reference, else to the sampler, per token, in nats."""
    score_fall: float = Field(default=0.3, gt=0, lt=1)
    """Fall of the score from its best window, as a share of that."""
    hacking_gain: float = Field(default=0.05, gt=0)
    """Gain in training score from which a fall of the held-out accuracy is reward hacking."""
    hacking_fall: float = Field(default=0.03, gt=0, lt=1)
    """Fall of accuracy from the best evaluation before."""
    mismatch_growth: float = Field(default=3.0, gt=1)
    """Mismatch of sampler and trainer, last window over first."""
    mismatch_floor: float = Field(default=1e-5, gt=0)
    """A mismatch below it is rounding, in nats."""
    skipped_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a window's steps that trained on nothing."""
    end_run: tuple[RoundSymptom, ...] = ()
    """Symptoms of a finished round that end the run with an error."""
    reject_round: tuple[RoundSymptom, ...] = ()
    """Symptoms for which what follows takes the policy before the round."""

    @model_validator(mode="after")
    def _check_gates(self) -> "DiagnosisConfig":
        both = sorted({*self.end_run} & {*self.reject_round})
        if both:
            raise ValueError(f"reject_round: got {both[0]}, which end_run has too; name it in one")
        return self
