"""The stage that measures a model by tasks of lm-evaluation-harness."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.model import ModelConfig
from engines.config.stages.base import BackendStageConfig
from engines.config.stages.inputs import ExternalInput, model_input
from engines.config.stages.serving import AnsweringStageConfig
from engines.config.suite import HARNESSES, LM_EVAL, HarnessConfig
from engines.config.training import TrainingConfig


class HarnessStageConfig(BackendStageConfig, AnsweringStageConfig):
    """A model as a user would load it, to the metrics of the harness's tasks."""

    stage = "harness"
    suite: Annotated[str, NotIdentity]
    """Its name."""
    is_against: Annotated[bool, NotIdentity] = False
    """Whether it is the model `against` that is measured."""
    model: ModelConfig | None = None
    """What is measured, where no stage made it."""
    harness: HarnessConfig
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the intervals, two-sided; in a recipe of `evaluation`."""

    @property
    def label(self) -> str:
        """With the suite."""
        return f"{self.stage}_{self.suite}" + ("_against" if self.is_against else "")

    @property
    def section(self) -> str:
        """Where a recipe has the tasks, for error lines."""
        return f"suites.{self.suite}.harness"

    @property
    def interpreter(self) -> Path | None:
        """Of the harness."""
        return HARNESSES.interpreter(LM_EVAL, self.section)

    @property
    def training(self) -> TrainingConfig:
        """Of the one rank that computes the log-likelihoods of given texts."""
        return TrainingConfig(num_threads=self.num_threads, dtype=self.dtype)

    @property
    def training_backend(self) -> str:
        """Of that rank."""
        return self.training.backend

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """The model of nobody's making, and the user's tasks."""
        del given
        own = model_input(self.model) if self.model else {}
        if self.harness.include is None:
            return own
        tasks = ExternalInput(Path(self.harness.include), f"{self.section}.include")
        return {**own, "tasks": tasks}

    def check(self) -> None:
        """The harness is there."""
        HARNESSES.find(LM_EVAL, self.section)
