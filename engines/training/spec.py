"""Settings of the training engines of a run's models (roles), and the type of their losses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.base import PlatformBase

ModelType = Literal["language_model", "value_model"]

LossFn = Callable[[ModelOutputs, TokenBatch, GlobalCounts], LossOutput]
"""A loss function; its attribute `readouts: Readouts` (default: none) requests further outputs.

An optional method `extras(batch, gather) -> Mapping[str, float]` returns `GlobalCounts.extras`,
computed from this rank's share before it is cut, so that statistics do not depend on the cut.
`gather` takes this rank's (N,) tensor and returns those of all ranks concatenated, in float64. The
result has to be equal on every rank; a sequence with a zero loss mask may be a filler."""

ScaledLoss = Callable[[ModelOutputs, TokenBatch], Tensor]
"""Returns the scalar to run backward from, given the outputs of a micro-batch."""


VALUE_HEAD = "score."
"""Prefix of the parameter names of a value model's head."""


@dataclass(frozen=True)
class EngineSpec:
    """Settings from which one engine is created.

    Attributes:
        training: `auto` is replaced by what it means on `platform`, but layers are compiled only
            if that was chosen before: only preflight knows of a compiler.
        optimizer: None makes an engine that only infers.
        total_steps: optimizer steps of the run, for the schedule.
        temperature: logprobs are those of softmax(logits / temperature), the sampled distribution.
        model_type: `language_model` yields logprobs, `value_model` one value per token.
    """

    hf_dir: Path
    training: TrainingConfig
    optimizer: OptimizerConfig | None
    total_steps: int
    platform: PlatformBase
    seed: int
    temperature: float = 1.0
    model_type: ModelType = "language_model"

    def __post_init__(self) -> None:
        training = self.training.on(accelerator=self.platform.is_accelerator, has_compiler=False)
        object.__setattr__(self, "training", training)


RoleName = Literal["policy", "reference", "critic", "reward", "teacher"]

POLICY: RoleName = "policy"
"""The model that is trained and sampled from."""
REFERENCE: RoleName = "reference"
"""The frozen model that the policy is kept close to."""
CRITIC: RoleName = "critic"
"""A value model that predicts the returns of the policy's answers."""
REWARD: RoleName = "reward"
"""A frozen value model; its value after a conversation's last token is the score."""
TEACHER: RoleName = "teacher"
"""A frozen model whose distributions the policy learns."""


@dataclass(frozen=True)
class ModelSource:
    """Weights on disk; those of `checkpoint_dir` (sharded) replace those of `hf_dir`."""

    hf_dir: Path
    checkpoint_dir: Path | None = None


@dataclass(frozen=True)
class RoleSpec:
    """Settings of one of the models that each rank holds.

    Attributes:
        training: its layout is the same for all roles.
        optimizer: None for a frozen model.
        model_type: a `value_model` has a head of one value per token, which the source may lack.
        restore_optimizer: restore the optimizer from the source's checkpoint.
        total_num_steps: optimizer steps of the schedule; unused by a constant one.
    """

    source: ModelSource
    training: TrainingConfig
    optimizer: OptimizerConfig | None = None
    model_type: ModelType = "language_model"
    restore_optimizer: bool = False
    total_num_steps: int = 0
