"""The stages that train on given answers."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from pydantic import Field

from engines.config.base import NotIdentity
from engines.config.plugins import (
    PluginKind,
)
from engines.config.rules.average import check_average
from engines.config.rules.order import check_supervised_order
from engines.config.rules.pairs import check_preference, check_reward_training
from engines.config.rules.sizes import check_divides
from engines.config.sections import (
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from engines.config.stages.base import TrainingStageConfig
from engines.config.stages.inputs import ExternalInput, model_input


class SFTStageConfig(TrainingStageConfig):
    """Dataset to policy checkpoint."""

    stage = "sft"
    sft: SFTConfig

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """The model."""
        del given
        return model_input(self.model)

    def check(self) -> None:
        """And a batch divides among the ranks, and the order has what it reads."""
        super().check()
        check_divides("sft.batch_size_sequences", self.sft.batch_size_sequences, self.training)
        check_average("sft.optimizer", self.sft.optimizer, self.training)
        check_supervised_order("sft.order", self.sft.order)


class RewardModelStageConfig(TrainingStageConfig):
    """Dataset, and a policy to start from, to a sequence classification model of one output."""

    stage = "reward_model"
    reward_model: RewardTrainingConfig
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    """Largest size of one safetensors file of the model; in a recipe `merge.max_shard_bytes`."""

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """The model, where no stage before trained one."""
        return {} if "policy" in given else model_input(self.model)

    def check(self) -> None:
        """And the rules of reward models."""
        super().check()
        check_reward_training(self.reward_model, self.training)


class PreferenceStageConfig(TrainingStageConfig):
    """Dataset and policy checkpoint to policy checkpoint."""

    stage = "preference"
    iteration: Annotated[int | None, NotIdentity] = Field(default=None, ge=1)
    """Of self-play; null where there is none."""
    preference: PreferenceConfig

    @property
    def label(self) -> str:
        """With the number of an iteration."""
        return f"{self.stage}_{self.iteration}" if self.iteration else self.stage

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the loss."""
        yield from super().plugins()
        yield "preference_loss", self.preference.loss

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """The model, where no stage before trained one."""
        return {} if "policy" in given else model_input(self.model)

    def check(self) -> None:
        """And the rules of preferences."""
        super().check()
        check_preference(self.preference, self.training)
