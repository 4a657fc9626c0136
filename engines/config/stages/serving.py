"""What the stages share that serve a model, and that judge its answers."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.backends import job_interpreter
from engines.config.plugins import PluginKind, is_embedded
from engines.config.rollout import RolloutConfig, SamplingConfig
from engines.config.rules.answers import check_structured_output
from engines.config.rules.models import check_judge, check_reward_models
from engines.config.rules.sizes import check_answer_length
from engines.config.sections import SelfPlayConfig
from engines.config.stages.base import BackendStageConfig, ComputingStageConfig, interpreter_of
from engines.config.stages.inputs import ExternalInput, reward_inputs
from infra.errors import ConfigError


class AnsweringStageConfig(ComputingStageConfig):
    """What the stages share that have rollout engines answer for a model."""

    num_threads: int = Field(default=1, ge=1)
    """CPU threads; in a recipe `training.num_threads`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of what reads beside the engines, and of the model unless `rollout.dtype` is given; in a
    recipe `training.dtype`."""
    rollout: RolloutConfig

    @property
    def driver_computes(self) -> bool:
        """Unless replicas do."""
        return is_embedded(self.rollout)

    @property
    def rollout_interpreter(self) -> Path | None:
        """Of the rollout engine."""
        return interpreter_of(self.rollout)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the rollout engine."""
        yield from super().plugins()
        yield "rollout", self.rollout.engine


class ServingStageConfig(BackendStageConfig, AnsweringStageConfig):
    """A policy or a model, served by rollout engines, and what scores its answers."""

    backend: str | None = None
    """The training backend that wrote the policy's checkpoint; null for a merged model."""
    reward: RewardConfig

    @property
    def interpreter(self) -> Path | None:
        """Of the training backend: where it ran, its checkpoint can be read."""
        return job_interpreter(self.backend, "training.backend") if self.backend else None

    @property
    def training_backend(self) -> str | None:
        """That of the checkpoint."""
        return self.backend

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the reward."""
        yield from super().plugins()
        for name in self.reward.functions:
            yield "reward", name

    def serving_values(self) -> dict[str, Any]:
        """What of `identity_values` says how the model is served; what judges it is left out."""
        values = self.identity_values()
        names = ("hardware", "backend", "num_threads", "dtype", "rollout", "model")
        return {name: values[name] for name in names if name in values}

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """What the reward reads."""
        del given
        return reward_inputs(self.reward)

    def check(self) -> None:
        """The models that judge are there, and can be asked."""
        check_reward_models(self.reward)
        check_judge(self.reward, self.rollout)


class SelfPlayStageConfig(ServingStageConfig):
    """A policy and the rows of a dataset to pairs of answers, of which one is the policy's."""

    stage = "self_play"
    iteration: int = Field(ge=1)
    max_length: int = Field(ge=1)
    """Tokens of a prompt with its answer; in a recipe `model.max_length`."""
    self_play: SelfPlayConfig
    sampling: SamplingConfig
    """In a recipe `preference.self_play.sampling`, or `rl.sampling`."""

    @property
    def label(self) -> str:
        """With the iteration's number."""
        return f"{self.stage}_{self.iteration}"

    def check(self) -> None:
        """And an answer fits behind a prompt, in the form that is asked for."""
        super().check()
        path, sampling = "preference.self_play.sampling", self.sampling
        if sampling.temperature == 0 and self.self_play.samples_per_prompt > 1:
            raise ConfigError(
                f"{path}.temperature",
                "got 0 with several answers to a prompt, which would be equal; need > 0; raise it",
            )
        check_structured_output(
            f"{path}.structured_output", sampling.structured_output, self.rollout
        )
        check_answer_length(f"{path}.max_new_tokens", sampling.max_new_tokens, self.max_length)
