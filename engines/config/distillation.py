"""A teacher in the RL rounds: how the policy learns its distributions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config.base import Execution, StrictModel
from engines.config.model import NamedModelConfig

TOPK = "topk"
"""The loss that compares distributions; all others are estimators on sampled tokens."""


class ServedTeacherConfig(StrictModel):
    """Separate engines for the teacher, of the same kind as the policy's."""

    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Engines on devices of their own; one beside a policy engine inside the job's process."""
    options: dict[str, Any] = {}
    """Options of the rollout engine, instead of the recipe's."""


class DistillationConfig(NamedModelConfig):
    """On-policy distillation (GKD, arXiv:2306.13649): a frozen teacher scores the policy's answers.

    Only the policy's tokens count; both distributions are at `rl.sampling.temperature`.
    """

    loss: str = TOPK
    """`topk`: KL from teacher to policy over the teacher's `num_top` likeliest tokens. Else a
    sampled-token KL from policy to teacher, as in `rl.algorithm.kl_loss_type` (`k2`, `k3+`)."""
    num_top: int = Field(default=64, ge=1)
    """Tokens per position that `topk` compares; 12 bytes each, for every token of a step."""
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket"
    """How `topk` treats other tokens. `bucket`: as one token with the remaining probability;
    `renormalise`: as if they did not exist; `ignore`: not at all (teaches too sharp a policy)."""
    loss_max_clamp: float | None = Field(default=None, gt=0)
    """Bound in nats, in both directions, on the loss of one token; null: no bound."""
    served: Annotated[ServedTeacherConfig | None, Execution] = None
    """Serve the teacher in rollout engines of its own, which need the capability `prompt_logprobs`;
    null: on the training ranks, in the policy's layout."""
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
