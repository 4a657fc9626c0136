"""Counters of the training steps that produced a policy."""

from infra.frozen_model import FrozenModel


class TrainedSteps(FrozenModel):
    """Content of `trainer.json` in a `policy` artifact."""

    schema_version: int = 1
    stage: str
    """`sft`, `preference` or `rl_round`."""
    num_steps: int
    """Steps of the stage; for `rl_round` over all rounds so far."""
    num_skipped: int = 0
    """Trailing steps in a row that trained on nothing."""
    kl_coef: float | None = None
    """Coefficient of the KL in the reward for the next step; null without such a KL."""
    num_critic_steps: int = 0
    """Steps that trained the current critic; 0 without a critic."""
