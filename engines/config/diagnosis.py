"""Thresholds that make a run sick, and the consequences.

No stage reads them. A rejected round changes the policy that the next stage gets as an input.
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
    """Thresholds of `rlhf diagnose` and of a run's page; they are part of no fingerprint.

    A curve is compared by window means: the last window with the first or the best one.
    """

    window_num_steps: int = Field(default=5, ge=1)
    """Steps of a window; a curve shorter than two windows is not judged."""
    memory_growth: float = Field(default=1.5, gt=1)
    """Largest ratio of the peak memory in the last window to the first."""
    sync_share: float = Field(default=0.3, gt=0, lt=1)
    """Largest share of the median step that passes until new weights are served."""
    unnamed_share: float = Field(default=0.3, gt=0, lt=1)
    """Largest share of the median step that belongs to no phase, that is, waiting."""
    entropy_ratio: float = Field(default=0.2, gt=0, lt=1)
    """Entropy of the last window over the first below which it has collapsed. If nearly every
    answer has the best score, the task is solved and it has not."""
    length_growth: float = Field(default=2.0, gt=1)
    """Largest growth of answer length from first to last window; healthy if the score rises."""
    cut_share: float = Field(default=0.3, gt=0, le=1)
    """Share of answers cut at the limit above which growth in length is no gain."""
    max_kl: float = Field(default=0.5, gt=0)
    """Largest KL per token in nats, to the reference, or without one to the sampler."""
    score_fall: float = Field(default=0.3, gt=0, lt=1)
    """Largest fall of the score from its best window, as a share of that score."""
    hacking_gain: float = Field(default=0.05, gt=0)
    """Gain in training score from which a fall of the held-out accuracy is reward hacking."""
    hacking_fall: float = Field(default=0.03, gt=0, lt=1)
    """Fall of the held-out accuracy from its best evaluation that counts as reward hacking."""
    mismatch_growth: float = Field(default=3.0, gt=1)
    """Largest ratio of the sampler-trainer mismatch in the last window to the first."""
    mismatch_floor: float = Field(default=1e-5, gt=0)
    """Mismatch in nats below which it is only rounding."""
    skipped_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of a window's steps that trained on nothing."""
    end_run: tuple[RoundSymptom, ...] = ()
    """Symptoms of a finished round that end the run with an error."""
    reject_round: tuple[RoundSymptom, ...] = ()
    """Symptoms that make later stages continue from the policy before the round."""

    @model_validator(mode="after")
    def _check_gates(self) -> "DiagnosisConfig":
        both = sorted({*self.end_run} & {*self.reject_round})
        if both:
            raise ValueError(f"reject_round: got {both[0]}, which end_run has too; name it in one")
        return self
