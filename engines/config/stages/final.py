"""The stages behind training: merge, soup, evaluate, compare, promote."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.backends import job_interpreter
from engines.config.base import NotIdentity
from engines.config.model import ModelConfig
from engines.config.plugins import (
    PluginKind,
    is_embedded,
)
from engines.config.rollout import RolloutConfig
from engines.config.rules.answers import check_structured_output
from engines.config.rules.models import check_judge, check_reward_models
from engines.config.sections import (
    EvaluationConfig,
    PromoteConfig,
)
from engines.config.stages.base import ComputingStageConfig, StageConfig, interpreter_of
from engines.config.stages.inputs import ExternalInput, model_input, reward_inputs
from hardware.platforms import repair_modules


class MergeStageConfig(StageConfig):
    """Sharded policy checkpoint to a Hugging Face safetensors directory."""

    stage = "merge"
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy it is, where several are merged; empty for the last."""
    backend: str
    """The training backend that wrote the checkpoint: its code writes the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    adapter_only: bool = False
    """Write the low-rank adapter alone, as PEFT loads it, instead of whole weights."""

    @property
    def label(self) -> str:
        """With the label of the stage whose policy it is."""
        return f"{self.stage}_{self.of}" if self.of else self.stage

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The training backend."""
        yield "backend", self.backend


class SoupStageConfig(StageConfig):
    """Several models to the mean of their weights."""

    stage = "soup"
    num_models: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In a recipe `merge.dtype`, as is the next field."""
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)

    @staticmethod
    def input_name(place: int) -> str:
        """What one of the models is called among the inputs, counted from 0."""
        return f"model_{place}"


class EvaluateStageConfig(ComputingStageConfig):
    """A policy or a model, and the evaluation rows, to scores."""

    stage = "evaluate"
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy it is, or the suite; empty for the merged model and the
    recipe's own problems."""
    model: ModelConfig | None = None
    """What is evaluated, where no stage made it."""
    backend: str | None = None
    """The training backend that wrote the policy's checkpoint; null for the merged model."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads; in a recipe `training.num_threads`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the reward model, and of the policy unless `rollout.dtype` is given; in a recipe
    `training.dtype`."""
    evaluation: EvaluationConfig
    rollout: RolloutConfig
    reward: RewardConfig

    @property
    def label(self) -> str:
        """With the label of the stage whose policy it is, or the suite."""
        return f"{self.stage}_{self.of}" if self.of else self.stage

    @property
    def driver_computes(self) -> bool:
        """Unless replicas do."""
        return is_embedded(self.rollout)

    @property
    def interpreter(self) -> Path | None:
        """Of the training backend: where it ran, its checkpoint can be read."""
        return job_interpreter(self.backend, "training.backend") if self.backend else None

    @property
    def rollout_interpreter(self) -> Path | None:
        """Of the rollout engine."""
        return interpreter_of(self.rollout)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the training backend, the rollout engine and the reward."""
        yield from super().plugins()
        if self.backend:
            yield "backend", self.backend
        yield "rollout", self.rollout.engine
        for name in self.reward.functions:
            yield "reward", name

    def plugin_modules(self) -> tuple[str, ...]:
        """And what the backend needs on this platform."""
        return (*super().plugin_modules(), *repair_modules(self.hardware.platform, self.backend))

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """What the reward reads, and the model of nobody's making."""
        del given
        return {**reward_inputs(self.reward), **(model_input(self.model) if self.model else {})}

    def check(self) -> None:
        """The rollout engine can keep answers to their form."""
        check_structured_output(
            "evaluation.structured_output", self.evaluation.structured_output, self.rollout
        )
        check_reward_models(self.reward)
        check_judge(self.reward, self.rollout)


class CompareStageConfig(StageConfig):
    """Two evaluations of the same problems, to what one model is better by."""

    stage = "compare"
    of: Annotated[str, NotIdentity] = ""
    """The suite; empty for the recipe's own problems."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the interval, two-sided, that a gain has to lie beyond; in a recipe of `evaluation`."""

    @property
    def label(self) -> str:
        """With the suite."""
        return f"{self.stage}_{self.of}" if self.of else self.stage


class PromoteStageConfig(StageConfig):
    """Final scores, and the incumbent's on the same problems, to a decision."""

    stage = "promote"
    promote: PromoteConfig
