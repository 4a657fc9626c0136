"""Configuration of self-play, and bases of stages that serve a model and score its answers."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.backends import ENGINES
from engines.config.plugins import PluginKind, is_embedded
from engines.config.rollout import SamplingConfig
from engines.config.rules.batches import check_answer_length
from engines.config.rules.models import check_judge, check_reward_models, check_structured_output
from engines.config.sections import SelfPlayConfig
from engines.config.stages.base import (
    REWARD_MODEL,
    BackendStageConfig,
    ExternalInput,
    InputT,
    RolloutStageConfig,
    needed,
    reward_inputs,
)
from infra.errors import refuse

if TYPE_CHECKING:
    from engines.config.recipe import Recipe


class AnsweringStageConfig(RolloutStageConfig):
    """Base of stages in which rollout engines serve a model."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads; in a recipe `training.num_threads`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of models beside the engines, and of the served model unless `rollout.dtype` is set; in
    a recipe `training.dtype`."""

    @property
    def driver_computes(self) -> bool:
        """True for the embedded engine; replicas have processes of their own."""
        return is_embedded(self.rollout)


class ServingStageConfig(BackendStageConfig, AnsweringStageConfig):
    """Base of stages that serve a policy or a model and score its answers."""

    backend: str | None = None
    """Training backend that wrote the policy's checkpoint; null for a merged model."""
    reward: RewardConfig

    @property
    def interpreter(self) -> Path | None:
        """Path of the Python that can read the backend's checkpoints; None: the project's own."""
        return ENGINES.interpreter(self.backend, "training.backend") if self.backend else None

    @property
    def training_backend(self) -> str | None:
        """Backend that wrote the checkpoint; None for a merged model."""
        return self.backend

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also yield the reward functions."""
        yield from super().plugins()
        for name in self.reward.functions:
            yield "reward", name

    def serving_values(self) -> dict[str, Any]:
        """Return the part of `identity_values` about serving the model, without the reward."""
        names = ("hardware", "backend", "num_threads", "dtype", "rollout", "model")
        return {name: value for name, value in self.identity_values().items() if name in names}

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return the files and models of the reward."""
        return reward_inputs(self.reward)

    def check(self) -> None:
        """Check the models that score answers."""
        check_reward_models(self.reward)
        check_judge(self.reward, self.rollout)


class SelfPlayStageConfig(ServingStageConfig):
    """Makes pairs of answers from a policy and the rows of a dataset."""

    stage = "self_play"
    labelled_by = "iteration"
    needs = ("dataset", "policy")
    takes = (REWARD_MODEL,)
    iteration: int = Field(ge=1)
    max_length: int = Field(ge=1)
    """Limit in tokens of a prompt with its answer; in a recipe `model.max_length`."""
    self_play: SelfPlayConfig
    sampling: SamplingConfig
    """How answers are sampled; in a recipe `preference.self_play.sampling`, or `rl.sampling`."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe", iteration: int) -> Self:
        """Configure an iteration, counted from 1; raises ValueError without self-play."""
        section = needed(recipe.preference and recipe.preference.self_play, "self-play")
        return cls(
            iteration=iteration,
            max_length=recipe.model.max_length,
            self_play=section,
            sampling=section.sampling or recipe.rl.sampling,
            backend=recipe.training.backend,
            num_threads=recipe.training.num_threads,
            dtype=recipe.training.compute_dtype,
            rollout=recipe.rollout.unquantized,
            reward=recipe.rl.reward if section.source == "best_worst" else RewardConfig(),
            hardware=recipe.hardware,
        )

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Keep the reward model only if pairs are made by reward."""
        found = super().inputs(given)
        if self.self_play.source != "best_worst":
            found.pop(REWARD_MODEL, None)
        return found

    @property
    def rows(self) -> tuple[str, ...]:
        """`sft`, the conversations, for `spin`; else `rl`, the prompts."""
        return ("sft",) if self.self_play.source == "spin" else ("rl",)

    def check(self) -> None:
        """Also check temperature, structured output and the length of answers."""
        super().check()
        path, sampling = "preference.self_play.sampling", self.sampling
        refuse(
            sampling.temperature == 0 and self.self_play.samples_per_prompt > 1,
            f"{path}.temperature",
            "got 0 with several answers to a prompt, which would be equal; need > 0; raise it",
        )
        check_structured_output(
            f"{path}.structured_output", sampling.structured_output, self.rollout
        )
        check_answer_length(f"{path}.max_new_tokens", sampling.max_new_tokens, self.max_length)
