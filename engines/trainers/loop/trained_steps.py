"""What a trained policy says of the steps behind it, over all rounds."""

from infra.frozen_model import FrozenModel


class TrainedSteps(FrozenModel):
    """Content of `trainer.json` in a `policy` artifact."""

    schema_version: int = 1
    stage: str
    """`sft`, `preference` or `rl_round`."""
    num_steps: int
    """Trainer steps over all stages so far."""
    num_skipped: int = 0
    """The last steps in a row that trained on nothing."""
    kl_coef: float | None = None
    """Of the KL in the reward, for the next step; null where there is none."""
    num_critic_steps: int = 0
    """Steps that trained the critic beside it, since that began; 0 where there is none."""
