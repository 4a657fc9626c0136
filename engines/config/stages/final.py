"""The stages behind training: merge, soup, evaluate, promote."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.plugins import PluginKind
from engines.config.rules.answers import check_structured_output
from engines.config.sections import EvaluationConfig, PromoteConfig
from engines.config.stages.base import StageConfig
from engines.config.stages.serving import ServingStageConfig


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


class EvaluateStageConfig(ServingStageConfig):
    """A policy or the merged model, and the evaluation rows, to scores."""

    stage = "evaluate"
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy it is; empty for the merged model."""
    evaluation: EvaluationConfig

    @property
    def label(self) -> str:
        """With the label of the stage whose policy it is."""
        return f"{self.stage}_{self.of}" if self.of else self.stage

    def check(self) -> None:
        """The rollout engine can keep answers to their form."""
        super().check()
        check_structured_output(
            "evaluation.structured_output", self.evaluation.structured_output, self.rollout
        )


class PromoteStageConfig(StageConfig):
    """Final scores, and the incumbent's on the same problems, to a decision."""

    stage = "promote"
    promote: PromoteConfig
