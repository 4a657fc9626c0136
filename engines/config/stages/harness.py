"""The stage that measures a model with tasks of lm-evaluation-harness."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.model import ModelConfig
from engines.config.stages.base import BackendStageConfig, ExternalInput, model_input
from engines.config.stages.serving import AnsweringStageConfig
from engines.config.suite import HARNESSES, LM_EVAL, HarnessConfig
from engines.config.training import TrainingConfig

if TYPE_CHECKING:
    from engines.config.recipe import Recipe


class HarnessStageConfig(BackendStageConfig, AnsweringStageConfig):
    """Computes the harness's task metrics for a model loaded as a user would load it."""

    stage = "harness"
    takes = ("model",)
    suite: Annotated[str, NotIdentity]
    is_against: Annotated[bool, NotIdentity] = False
    """True if the model `against` is measured instead of the final one."""
    model: ModelConfig | None = None
    """Model to measure, if no stage made it."""
    harness: HarnessConfig
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Two-sided confidence level of intervals; in a recipe `evaluation.confidence`."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe", name: str, *, is_against: bool = False) -> Self:
        """Measure the final model, or the one `against`, on a suite."""
        own = None if recipe.trains else recipe.model
        model = recipe.against if is_against else own
        return cls(
            suite=name,
            is_against=is_against,
            hardware=recipe.hardware,
            num_threads=recipe.training.num_threads,
            dtype=recipe.training.dtype,
            rollout=recipe.rollout,
            model=model.measured if model else None,
            harness=recipe.harness_suites[name],
            confidence=recipe.evaluation.confidence,
        )

    @property
    def label(self) -> str:
        """`harness`, with the suite."""
        return f"{self.stage}_{self.suite}" + ("_against" if self.is_against else "")

    @property
    def section(self) -> str:
        """Path of the tasks in a recipe, for error messages."""
        return f"suites.{self.suite}.harness"

    @property
    def interpreter(self) -> Path | None:
        """Python of the harness's job environment."""
        return HARNESSES.interpreter(LM_EVAL, self.section)

    @property
    def training(self) -> TrainingConfig:
        """Settings of the rank that computes log-likelihoods of given texts."""
        return TrainingConfig(num_threads=self.num_threads, dtype=self.dtype)

    @property
    def training_backend(self) -> str:
        """Backend of that rank."""
        return self.training.backend

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return the model, if no stage made it, and the user's tasks."""
        own = model_input(self.model) if self.model else {}
        if self.harness.include is None:
            return own
        tasks = ExternalInput(Path(self.harness.include), f"{self.section}.include")
        return {**own, "tasks": tasks}

    def check(self) -> None:
        """Check that the harness is installed."""
        HARNESSES.find(LM_EVAL, self.section)
