"""How completions are sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field

from engines.config.base import Execution, NotIdentity, StrictModel

RoutingName = Literal["by_place", "least_loaded"]
"""Which replica of an engine samples what: see `engines.rollout.routing`."""


class SamplingConfig(StrictModel):
    """The sampling distribution. Reported logprobs are those of this distribution."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 switches it off."""
    max_new_tokens: int = Field(default=1024, ge=1)


class RolloutConfig(StrictModel):
    """The rollout engine and its capacity."""

    engine: str = "transformers"
    """Name of a rollout engine."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null uses `training.dtype`."""
    max_num_sequences: Annotated[int, Execution] = Field(default=256, ge=1)
    """Sequences decoded together."""
    placement: Annotated[Literal["colocated", "disaggregated"], Execution] = "colocated"
    """Where the engines run: in the training ranks, or beside them in processes of their own."""
    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Engines beside the ranks; `colocated` has one in each rank."""
    timeout_s: Annotated[float, NotIdentity] = Field(default=1800.0, gt=0)
    """After which the unfinished samples of one batch of requests are aborted."""
    silence_s: Annotated[float, NotIdentity] = Field(default=120.0, gt=0)
    """An engine beside the ranks that answers nothing for so long while it samples is ended."""
    max_num_restarts: Annotated[int, NotIdentity] = Field(default=3, ge=0)
    """Engines beside the ranks that may be lost and started again, in one stage."""
    options: dict[str, Any] = {}
    """Options of the chosen engine."""
