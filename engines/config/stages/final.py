"""Configuration of the stages after training: merge, soup, evaluate, harness, compare, promote."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.base import NotIdentity
from engines.config.model import ModelConfig
from engines.config.plugins import PluginKind
from engines.config.rules.models import check_structured_output
from engines.config.sections import EvaluationConfig, PromoteConfig
from engines.config.stages.base import (
    REWARD_MODEL,
    BackendStageConfig,
    ExternalInput,
    InputT,
    StageConfig,
    model_input,
)
from engines.config.stages.serving import AnsweringStageConfig, ServingStageConfig
from engines.config.suite import HARNESSES, LM_EVAL, HarnessConfig, suite_sections
from engines.config.training import TrainingConfig
from infra.names import renamed_sections

if TYPE_CHECKING:
    from engines.config.recipe import Recipe

AGAINST = "against"


class MergeStageConfig(StageConfig):
    """Merges a sharded policy checkpoint into a Hugging Face safetensors directory."""

    stage = "merge"
    labelled_by = "of"
    needs = ("policy",)
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy is merged, if several are; empty for the last policy."""
    backend: str
    """Training backend that wrote the checkpoint; its code writes the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    adapter_only: bool = False
    """Write only the low-rank adapter, in PEFT's format, instead of whole weights."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe", of: str = "") -> Self:
        """Configure the merge of the policy of stage `of`, or of the last one if `of` is empty."""
        return cls(
            of=of,
            backend=recipe.training.backend,
            # Average in float32 and round once.
            dtype="float32" if of else recipe.merge.dtype,
            max_shard_bytes=recipe.merge.max_shard_bytes,
        )

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Yield the training backend."""
        yield "backend", self.backend


class SoupStageConfig(StageConfig):
    """Averages the weights of several models."""

    stage = "soup"
    num_models: int = Field(ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the averaged weights; in a recipe `merge.dtype`."""
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)

    @classmethod
    def from_recipe(cls, recipe: "Recipe", num_models: int) -> Self:
        """Configure the average of `num_models` models."""
        return cls(
            num_models=num_models,
            dtype=recipe.merge.dtype,
            max_shard_bytes=recipe.merge.max_shard_bytes,
        )

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Return every model, in order."""
        return {name: given[name] for name in map(self.input_name, range(self.num_models))}

    @staticmethod
    def input_name(place: int) -> str:
        """Return the name of the input that is the model at `place`, counted from 0."""
        return f"model_{place}"


class EvaluateStageConfig(ServingStageConfig):
    """Evaluates a policy or model on evaluation rows."""

    stage = "evaluate"
    labelled_by = "of"
    needs = ("dataset",)
    takes = ("policy", "model", REWARD_MODEL)
    of: Annotated[str, NotIdentity] = ""
    """Label of the evaluated policy's stage, or a suite, or `incumbent`; empty: the final model on
    the recipe's problems. The suffix `against` means the model that it is compared with."""
    suite: Annotated[str, NotIdentity] = ""
    """Suite that has the problems; empty for the recipe's own."""
    own_reward: Annotated[bool, NotIdentity] = False
    """True if the suite has its own reward; else the RL reward scores its answers."""
    model: ModelConfig | None = None
    """Model to evaluate, if no stage made it."""
    model_section: Annotated[str, NotIdentity] = "model"
    evaluation: EvaluationConfig

    @classmethod
    def from_recipe(cls, recipe: "Recipe", of: str = "") -> Self:
        """Configure an evaluation on the recipe's problems: of stage `of`, or the final model."""
        return cls._asked(recipe, of, recipe.evaluation, recipe.rl.reward).model_copy(
            update={"backend": recipe.training.backend if of else None}
        )

    @classmethod
    def of_suite(cls, recipe: "Recipe", name: str) -> Self:
        """Configure an evaluation of the final model on a suite."""
        suite = recipe.suites[name]
        return cls._asked(
            recipe, name, suite.evaluation, suite.reward or recipe.rl.reward
        ).model_copy(update={"suite": name, "own_reward": suite.reward is not None})

    @classmethod
    def _asked(
        cls,
        recipe: "Recipe",
        of: str,
        evaluation: EvaluationConfig,
        reward: RewardConfig,
    ) -> Self:
        # The job does not see `rl.sampling`, so its values replace nulls here.
        unset = [
            name
            for name in ("max_new_tokens", "stop", "stop_token_ids")
            if getattr(evaluation, name) is None
        ]
        return cls(
            of=of,
            hardware=recipe.hardware,
            num_threads=recipe.training.num_threads,
            dtype=recipe.training.compute_dtype,
            model=None if recipe.trains else recipe.model.measured,
            evaluation=evaluation.model_copy(
                update={name: getattr(recipe.rl.sampling, name) for name in unset}
            ),
            rollout=recipe.rollout.unquantized,
            reward=reward,
        )

    def against(self, model: ModelConfig) -> Self:
        """Return the same evaluation of `model`, with which the final model is compared."""
        return self.model_copy(
            update={
                "of": f"{self.of}_{AGAINST}".lstrip("_"),
                "model": model.measured,
                "model_section": AGAINST,
            }
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """`evaluation`; empty if the problems are a suite's."""
        return () if self.suite else ("evaluation",)

    @property
    def sections(self) -> dict[str, str]:
        """New names of recipe sections in error messages, by old name."""
        sections = suite_sections(self.suite) if self.suite else {}
        if not self.own_reward:
            sections.pop("rl.reward", None)
        return {**sections, "model": self.model_section}

    @property
    def answer_setting(self) -> str:
        """The recipe field that limits an answer."""
        return f"{self.sections.get('evaluation', 'evaluation')}.max_new_tokens"

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Also return the model, if no stage made it."""
        with renamed_sections(self.sections):
            return {**super().external_inputs(given), **model_input(self.model)}

    def check(self) -> None:
        """Check that the rollout engine supports structured output."""
        with renamed_sections(self.sections):
            super().check()
            check_structured_output(
                "evaluation.structured_output", self.evaluation.structured_output, self.rollout
            )


class CompareStageConfig(StageConfig):
    """Compares two evaluations of the same problems and computes the gain."""

    stage = "compare"
    labelled_by = "of"
    needs = ("evaluation", "against")
    of: Annotated[str, NotIdentity] = ""
    """The suite; empty for the recipe's own problems."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Two-sided confidence level of the interval; in a recipe `evaluation.confidence`."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe", suite: str = "") -> Self:
        """Configure the comparison on a suite, or on the recipe's own problems."""
        # A harness suite has no evaluation section; it uses the recipe's confidence.
        has_own = suite in recipe.data_suites
        section = recipe.suites[suite] if has_own else recipe
        return cls(of=suite, confidence=section.evaluation.confidence)


class PromoteStageConfig(StageConfig):
    """Decides on promotion from the final scores and the incumbent's on the same problems."""

    stage = "promote"
    needs = ("evaluation", "model")
    takes = ("incumbent", "incumbent_evaluation")
    promote: PromoteConfig

    @classmethod
    def from_recipe(cls, recipe: "Recipe") -> Self:
        """Configure the stage by the section `promote`."""
        return cls(promote=recipe.promote)


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
        """Configure measuring the final model, or the model `against`, on a suite."""
        model = recipe.against if is_against else None if recipe.trains else recipe.model
        return cls(
            suite=name,
            is_against=is_against,
            hardware=recipe.hardware,
            num_threads=recipe.training.num_threads,
            dtype=recipe.training.compute_dtype,
            rollout=recipe.rollout.unquantized,
            model=model.measured if model else None,
            harness=recipe.harness_suites[name],
            confidence=recipe.evaluation.confidence,
        )

    @property
    def label(self) -> str:
        """`harness_<suite>`, with the suffix `_against` if that model is measured."""
        return f"{self.stage}_{self.suite}" + ("_against" if self.is_against else "")

    @property
    def section(self) -> str:
        """Section of the recipe that names the tasks, for error messages."""
        return f"suites.{self.suite}.harness"

    @property
    def interpreter(self) -> Path | None:
        """Path of the Python that runs the harness; None: the project's own."""
        return HARNESSES.interpreter(LM_EVAL, self.section)

    @property
    def training(self) -> TrainingConfig:
        """Settings of the rank that computes log-likelihoods of given texts."""
        return TrainingConfig(num_threads=self.num_threads, dtype=self.dtype)

    @property
    def training_backend(self) -> str:
        """Backend of the rank that computes log-likelihoods."""
        return self.training.backend

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return the model, if no stage made it, and the user's tasks."""
        found = model_input(self.model)
        if self.harness.include is not None:
            found["tasks"] = ExternalInput(Path(self.harness.include), f"{self.section}.include")
        return found

    def check(self) -> None:
        """Check that the harness is installed."""
        HARNESSES.find(LM_EVAL, self.section)
