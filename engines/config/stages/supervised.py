"""Configuration of the stages that train on given answers: SFT, reward model, preferences."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.options import check_options
from engines.config.plugins import PluginKind
from engines.config.rows import BRADLEY_TERRY, PREFERENCE_LOSSES
from engines.config.rules.batches import check_supervised
from engines.config.rules.models import check_value_model
from engines.config.sections import (
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from engines.config.stages.base import TrainingStageConfig, needed

if TYPE_CHECKING:
    from engines.config.recipe import Recipe


class SFTStageConfig(TrainingStageConfig):
    """Trains a policy on conversations."""

    stage = "sft"
    needs = ("dataset",)
    sft: SFTConfig

    @classmethod
    def from_recipe(cls, recipe: "Recipe") -> Self:
        """Configure the stage by the section `sft`; raises ValueError if the recipe has none."""
        return cls(
            model=recipe.model,
            training=recipe.training,
            sft=needed(recipe.sft, "SFT stage"),
            checkpoint=recipe.checkpoint,
            hardware=recipe.hardware,
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """`sft`, the conversations."""
        return ("sft",)

    def check(self) -> None:
        """Check batch size, weight averages and the order."""
        super().check()
        check_supervised("sft", self.sft, "batch_size_sequences", self.training)


class RewardModelStageConfig(TrainingStageConfig):
    """Trains a reward model (sequence classification with one output) on pairs of answers."""

    stage = "reward_model"
    needs = ("dataset",)
    takes = ("policy",)
    reward_model: RewardTrainingConfig
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    """Largest size in bytes of one safetensors file; in a recipe `merge.max_shard_bytes`."""

    @classmethod
    def from_recipe(cls, recipe: "Recipe") -> Self:
        """Configure the stage by `reward_model`; raises ValueError if the recipe has none."""
        return cls(
            model=recipe.model,
            # LoRA is for the policy; all weights of a reward model are trained.
            training=recipe.training.model_copy(update={"lora": None}),
            reward_model=needed(recipe.reward_model, "reward model stage"),
            max_shard_bytes=recipe.merge.max_shard_bytes,
            checkpoint=recipe.checkpoint,
            hardware=recipe.hardware,
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """`preference`, the pairs."""
        return ("preference",)

    def check(self) -> None:
        """Also check the rules of reward models."""
        super().check()
        check_value_model("reward_model", self.training)
        check_options(self.reward_model.options, [BRADLEY_TERRY], "reward_model.options")
        check_supervised("reward_model", self.reward_model, "batch_size_pairs", self.training)


class PreferenceStageConfig(TrainingStageConfig):
    """Trains a policy on pairs of answers."""

    stage = "preference"
    labelled_by = "iteration"
    needs = ("dataset",)
    takes = ("policy", "pairs")
    iteration: Annotated[int | None, NotIdentity] = Field(default=None, ge=1)
    """Iteration of self-play; null without self-play."""
    preference: PreferenceConfig

    @classmethod
    def from_recipe(cls, recipe: "Recipe", iteration: int | None = None) -> Self:
        """Configure the stage by `preference`; raises ValueError if the recipe has none."""
        section = needed(recipe.preference, "preference stage")
        return cls(
            iteration=iteration,
            model=recipe.model,
            training=recipe.training,
            # Self-play settings are part of the fingerprint of the pairs.
            preference=section.model_copy(update={"self_play": None}),
            checkpoint=recipe.checkpoint,
            hardware=recipe.hardware,
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """`preference`, the pairs; empty if self-play makes them."""
        return () if self.iteration else ("preference",)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also yield the loss."""
        yield from super().plugins()
        yield "preference_loss", self.preference.loss

    def check(self) -> None:
        """Also check the rules of preference training."""
        super().check()
        loss = PREFERENCE_LOSSES.find(self.preference.loss)
        check_options(self.preference.options, [loss], "preference.options")
        check_supervised("preference", self.preference, "batch_size_pairs", self.training)
