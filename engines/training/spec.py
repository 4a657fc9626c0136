"""What a training engine is made from, and the loss functions it is called with."""

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
"""A loss function; its attribute `readouts: Readouts` (default: none) says what else it reads.

It may have a method `extras(batch, gather) -> Mapping[str, float]`, which is asked for before the
batch is cut: what it wants to know of the whole step, for `GlobalCounts.extras`. It gets the rank's
share (a sequence whose loss mask is 0 everywhere may be there for company alone) and a function
that takes a (N,) tensor of its own and returns all ranks', one behind the other, in float64. Equal
on every rank it must be; a loss that used statistics of a micro-batch instead would depend on how
the batch was cut.
"""

ScaledLoss = Callable[[ModelOutputs, TokenBatch], Tensor]
"""What a backend calls on the outputs of a micro-batch: the scalar to run backward from."""


VALUE_HEAD = "score."
"""First part of the names of a value model's head."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from.

    Attributes:
        hf_dir: Hugging Face directory of the model.
        training: backend, layout, numerics, token budget.
        optimizer: None makes an engine that only infers (a reference model).
        total_steps: optimizer steps of the run, for the schedule.
        platform: the device.
        seed: of everything random in the engine.
        temperature: log-probabilities are those of softmax(logits / temperature), so that they
            speak of the distribution that was sampled from.
        model_type: `language_model` yields log-probabilities, `value_model` one value per token.
    """

    hf_dir: Path
    training: TrainingConfig
    optimizer: OptimizerConfig | None
    total_steps: int
    platform: PlatformBase
    seed: int
    temperature: float = 1.0
    model_type: ModelType = "language_model"
