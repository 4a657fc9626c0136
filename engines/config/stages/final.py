"""The stages behind training: merge, soup, evaluate, compare, promote."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.model import ModelConfig
from engines.config.plugins import PluginKind
from engines.config.rules.answers import check_structured_output
from engines.config.sections import EvaluationConfig, PromoteConfig
from engines.config.stages.base import StageConfig
from engines.config.stages.inputs import ExternalInput, model_input
from engines.config.stages.serving import ServingStageConfig
from engines.config.suite import suite_sections
from infra.section_names import renamed_sections


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
    """A policy or a model, and the evaluation rows, to scores."""

    stage = "evaluate"
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy it is, or the suite, with `against` behind it of the model
    that the final one is compared with, or `incumbent`; empty for the final model and the recipe's
    own problems."""
    suite: Annotated[str, NotIdentity] = ""
    """Whose problems they are; empty for the recipe's own."""
    own_reward: Annotated[bool, NotIdentity] = False
    """Whether the suite has a reward; else its answers are judged as those of RL."""
    model: ModelConfig | None = None
    """What is evaluated, where no stage made it."""
    model_section: Annotated[str, NotIdentity] = "model"
    """Of the recipe, that names it."""
    evaluation: EvaluationConfig

    @property
    def label(self) -> str:
        """With the label of the stage whose policy it is, or the suite."""
        return f"{self.stage}_{self.of}" if self.of else self.stage

    @property
    def sections(self) -> dict[str, str]:
        """What the sections of a recipe that it reads are called in this one's."""
        sections = suite_sections(self.suite) if self.suite else {}
        if not self.own_reward:
            sections.pop("rl.reward", None)
        return {**sections, "model": self.model_section}

    @property
    def answer_setting(self) -> str:
        """The field of a recipe that limits an answer."""
        return f"{self.sections.get('evaluation', 'evaluation')}.max_new_tokens"

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """And the model of nobody's making."""
        with renamed_sections(self.sections):
            own = model_input(self.model) if self.model else {}
            return {**super().external_inputs(given), **own}

    def check(self) -> None:
        """The rollout engine can keep answers to their form."""
        with renamed_sections(self.sections):
            super().check()
            check_structured_output(
                "evaluation.structured_output", self.evaluation.structured_output, self.rollout
            )


class CompareStageConfig(StageConfig):
    """Two evaluations of the same problems, to what one model is better by."""

    stage = "compare"
    of: Annotated[str, NotIdentity] = ""
    """The suite; empty for the recipe's own problems."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the interval, two-sided, that a gain has to lie beyond; in a recipe of the evaluation."""

    @property
    def label(self) -> str:
        """With the suite."""
        return f"{self.stage}_{self.of}" if self.of else self.stage


class PromoteStageConfig(StageConfig):
    """Final scores, and the incumbent's on the same problems, to a decision."""

    stage = "promote"
    promote: PromoteConfig
