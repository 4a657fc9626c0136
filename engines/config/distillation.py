"""A teacher in the rounds of RL: whose distributions the policy learns, and how."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.base import Execution, StrictModel
from engines.config.model import NamedModelConfig

TOPK = "topk"
"""The loss that compares distributions; every other one is an estimator of sampled tokens."""


class ServedTeacherConfig(StrictModel):
    """Engines of the teacher's own, of the kind that samples from the policy."""

    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Engines on devices of their own; one beside the policy where that is in the job's process."""
    options: dict[str, Any] = {}
    """Options of the rollout engine, instead of the recipe's."""


class DistillationConfig(NamedModelConfig):
    """On-policy distillation: a frozen teacher is asked about the policy's own answers.

    GKD (arXiv:2306.13649). Of the policy's tokens; both distributions are those at
    `rl.sampling.temperature`.
    """

    loss: str = TOPK
    """`topk`: the KL from the teacher to the policy, over the teacher's `num_top` likeliest tokens.
    Or an estimate of the KL from the policy to the teacher by the sampled token alone, named as
    `rl.algorithm.kl_loss_type` is (`k2`, `k3+`)."""
    num_top: int = Field(default=64, ge=1)
    """Tokens of each position that `topk` compares; 12 bytes each, of every token of a step."""
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket"
    """What `topk` makes of all other tokens: one more token, which has the rest of the probability;
    nothing, as if there were only these; or nothing at all, which teaches too sharp a policy."""
    loss_max_clamp: float | None = Field(default=None, gt=0)
    """Nats that one token may add, either way; null: any."""
    served: Annotated[ServedTeacherConfig | None, Execution] = None
    """Where the teacher is: in rollout engines of its own, which need the capability
    `prompt_logprobs`; null: on the training ranks, in the policy's layout."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the teacher's loss."""
    policy_weight: float = Field(default=0.0, ge=0)
    """Weight of the algorithm's own loss, which uses rewards; 0: rewards are only metrics."""

    @model_validator(mode="after")
    def _check_path(self) -> "DistillationConfig":
        if self.path is None:
            raise ValueError(
                "path: missing; need the teacher, a model directory or a hub id; set it"
            )
        return self
