"""What a training engine is made from, and the loss functions it calls."""

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
"""A loss function; its attribute `readouts: Readouts` (default: none) names other inputs it reads.

An optional method `extras(batch, gather) -> Mapping[str, float]` returns `GlobalCounts.extras`,
computed from this rank's share before it is cut, so that statistics do not depend on the cut.
`gather` takes this rank's (N,) tensor and returns those of all ranks concatenated, in float64. The
result has to be equal on every rank; a sequence with a zero loss mask may be a filler.
"""

ScaledLoss = Callable[[ModelOutputs, TokenBatch], Tensor]
"""Returns the scalar to run backward from, given the outputs of a micro-batch."""


VALUE_HEAD = "score."
"""Prefix of the parameter names of a value model's head."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from.

    Attributes:
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
