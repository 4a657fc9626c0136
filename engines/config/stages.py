"""Each stage, declared once: its name, its configuration, its plugins, its files, its rules.

All of a stage's configuration enters its fingerprint, but for the fields marked `NotIdentity`.
What a job needs without being configured by a recipe stands in `Runtime`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.backends import check_layout, job_interpreter
from engines.config.base import NotIdentity, StrictModel, local_path
from engines.config.data import AUTO, SOURCE_SPLITS, DataConfig
from engines.config.lora_sync import adapter_travels
from engines.config.model import ModelConfig
from engines.config.plugins import (
    ROLLOUT_ENGINES,
    PluginKind,
    is_embedded,
    named_rows,
    plugin_modules,
    recognised_layouts,
)
from engines.config.rollout import RolloutConfig
from engines.config.rules import (
    check_algorithm,
    check_answer_length,
    check_critic,
    check_divides,
    check_judge,
    check_reward_models,
    check_sampling,
    check_structured_output,
    check_value_models,
)
from engines.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    PromoteConfig,
    RLConfig,
    SFTConfig,
)
from engines.config.training import HardwareConfig, TrainingConfig
from hardware.detection import create
from hardware.platforms import repair_modules


class Runtime(StrictModel):
    """What a job needs to run but that cannot change its output; outside the fingerprint."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    progress_deadlines_s: dict[str, float] = {}
    """By phase, instead of the deadline that the phase declares itself."""


@dataclass(frozen=True)
class ExternalInput:
    """Something from outside the pipeline that a stage reads.

    Attributes:
        path: a local file or directory.
        setting: what names it in a recipe, for error lines.
        is_script: a Python file, which counts with the modules beside it that it imports.
    """

    path: Path
    setting: str
    is_script: bool = False


class StageConfig(StrictModel):
    """One stage. Its job is `engines.jobs.<stage>`, its task is in `tasks.stages`."""

    stage: ClassVar[str]
    """Kind of stage, and the name of its job's module."""

    @property
    def job_module(self) -> str:
        """The job's main module."""
        return f"engines.jobs.{self.stage}"

    @property
    def label(self) -> str:
        """Name of this stage within a run."""
        return self.stage

    @property
    def interpreter(self) -> Path | None:
        """Python of the job environment that the job needs; None: the project's own."""
        return None

    @property
    def rollout_interpreter(self) -> Path | None:
        """Python that its rollout replicas need; None: the job's, or it has none."""
        return None

    @property
    def driver_resources(self) -> Mapping[str, Any]:
        """What Ray keeps free for the job's own process, as keyword arguments of `ray.remote`.

        Nothing where it has to come at once with what the job starts elsewhere: a process that
        held its part and waited for the rest could wait for another that does the same.
        """
        return {"num_cpus": 1}

    @property
    def num_previous_steps(self) -> int:
        """Steps of the stages before, from which its journal counts on."""
        return 0

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The kind and name of every part that the configuration names."""
        yield from ()

    def plugin_targets(self) -> list[str]:
        """What the names of its parts lead to, with what their rows say that changes numbers."""
        return [row.counted for row in named_rows(self.plugins())]

    def plugin_modules(self) -> tuple[str, ...]:
        """Modules of the named parts, other people's too, sorted; their sources count."""
        return plugin_modules(self.plugins())

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """What the job reads that no stage made.

        Args:
            given: names of the artifacts that it is given.

        Returns:
            By the name that the job knows it by.
        """
        del given
        return {}

    def check(self) -> None:
        """Refuse settings that do not fit each other; asked by the recipe and by the job.

        Raises:
            ConfigError: names the field.
        """


class PreprocessStageConfig(StageConfig):
    """Raw data to rows, and the tokenizer of a model made from scratch."""

    stage = "preprocess"
    data: DataConfig
    model: ModelConfig

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The preprocessors of the sources; each that `auto` may find."""
        for split in SOURCE_SPLITS:
            for source in getattr(self.data, split):
                names = recognised_layouts() if source.format == AUTO else [source.format]
                for name in names:
                    yield "preprocessor", name

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Every local source, and the model, for its tokenizer."""
        del given
        sources = {
            f"data.{split}.{index}": ExternalInput(path, f"data.{split}.{index}.path")
            for split in SOURCE_SPLITS
            for index, source in enumerate(getattr(self.data, split))
            if (path := local_path(source.path))
        }
        return {**sources, **_model(self.model)}


class ComputingStageConfig(StageConfig):
    """What the stages share whose numbers depend on the device that computes them."""

    hardware: HardwareConfig = HardwareConfig()

    @property
    def driver_computes(self) -> bool:
        """Whether the job's own process computes on a device that is reserved when it starts."""
        return True

    @property
    def driver_resources(self) -> Mapping[str, Any]:
        """A device."""
        if not self.driver_computes:
            return {}
        platform = self.hardware.platform
        device = {} if platform == "auto" else create(platform).ray_resource_options(1)
        return {**super().driver_resources, **device}

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The platform; before a plan has resolved it, `auto` is none."""
        yield "platform", self.hardware.platform


class TrainingStageConfig(ComputingStageConfig):
    """What the stages that train a policy share."""

    model: ModelConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig

    @property
    def driver_computes(self) -> bool:
        """Of one rank."""
        return self.training.num_workers == 1

    @property
    def interpreter(self) -> Path | None:
        """Of the training backend."""
        return job_interpreter(self.training.backend, "training.backend")

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the training backend."""
        yield from super().plugins()
        yield "backend", self.training.backend

    def plugin_modules(self) -> tuple[str, ...]:
        """And what the backend needs on this platform."""
        repairs = repair_modules(self.hardware.platform, self.training.backend)
        return (*super().plugin_modules(), *repairs)

    def check(self) -> None:
        """The backend has the layout."""
        check_layout(self.training)


class SFTStageConfig(TrainingStageConfig):
    """Dataset to policy checkpoint."""

    stage = "sft"
    sft: SFTConfig

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """The model."""
        del given
        return _model(self.model)

    def check(self) -> None:
        """And a batch divides among the ranks."""
        super().check()
        check_divides("sft.batch_size_sequences", self.sft.batch_size_sequences, self.training)


class RLRoundStageConfig(TrainingStageConfig):
    """Policy checkpoint to policy checkpoint."""

    stage = "rl_round"
    round: int = Field(ge=1)
    rollout: RolloutConfig
    rl: RLConfig

    @property
    def label(self) -> str:
        """With the round's number."""
        return f"{self.stage}_{self.round}"

    @property
    def driver_computes(self) -> bool:
        """Of one rank that has no replicas."""
        return super().driver_computes and is_embedded(self.rollout)

    @property
    def num_previous_steps(self) -> int:
        """Of the rounds before."""
        return self.rl.num_steps_before(self.round)

    @property
    def rollout_interpreter(self) -> Path | None:
        """Of the rollout engine."""
        return _rollout_interpreter(self.rollout)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the rollout engine, the reward and the parts of the algorithm."""
        algorithm = self.rl.algorithm
        yield from super().plugins()
        yield "rollout", self.rollout.engine
        for name in self.rl.reward.functions:
            yield "reward", name
        yield "adv_estimator", algorithm.adv_estimator
        yield "loss_mode", algorithm.loss_mode
        yield "kl_loss_type", algorithm.kl_loss_type.removesuffix("+")
        if algorithm.use_kl_in_reward:
            yield "kl_loss_type", algorithm.kl_penalty

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """What the reward reads, and the model where the round or its reference starts from it."""
        from_model = "policy" not in given or (
            self.rl.algorithm.needs_reference and "reference" not in given
        )
        return {**_reward(self.rl.reward), **(_model(self.model) if from_model else {})}

    def check(self) -> None:
        """And the rules of RL."""
        super().check()
        check_structured_output(
            "rl.sampling.structured_output", self.rl.sampling.structured_output, self.rollout
        )
        adapter_travels(self.training, self.rollout)
        check_sampling(self.rl)
        check_algorithm(self.rl)
        check_critic(self.rl)
        check_value_models(self.rl, self.training)
        check_reward_models(self.rl.reward)
        check_judge(self.rl.reward, self.rollout)
        check_answer_length(
            "rl.sampling.max_new_tokens", self.rl.sampling.max_new_tokens, self.model.max_length
        )
        # The unset mini-batch is the whole batch, which is what the user can change.
        smaller = self.rl.prompts_per_update < self.rl.batch_size_prompts
        field = "rl.mini_batch_size_prompts" if smaller else "rl.batch_size_prompts"
        check_divides(field, self.rl.prompts_per_update, self.training)


class MergeStageConfig(StageConfig):
    """Sharded policy checkpoint to a Hugging Face safetensors directory."""

    stage = "merge"
    backend: str
    """The training backend that wrote the checkpoint: its code writes the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    adapter_only: bool = False
    """Write the low-rank adapter alone, as PEFT loads it, instead of whole weights."""

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """The training backend."""
        yield "backend", self.backend


class EvaluateStageConfig(ComputingStageConfig):
    """A policy or the merged model, and the evaluation rows, to scores."""

    stage = "evaluate"
    of: Annotated[str, NotIdentity] = ""
    """Label of the stage whose policy it is; empty for the merged model."""
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
        """With the label of the stage whose policy it is."""
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
        return _rollout_interpreter(self.rollout)

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
        """What the reward reads."""
        del given
        return _reward(self.reward)

    def check(self) -> None:
        """The rollout engine can keep answers to their form."""
        check_structured_output(
            "evaluation.structured_output", self.evaluation.structured_output, self.rollout
        )
        check_reward_models(self.reward)
        check_judge(self.reward, self.rollout)


class PromoteStageConfig(StageConfig):
    """Final scores, and the incumbent's on the same problems, to a decision."""

    stage = "promote"
    promote: PromoteConfig


def _rollout_interpreter(rollout: RolloutConfig) -> Path | None:
    if is_embedded(rollout):
        return None
    return ROLLOUT_ENGINES.interpreter(rollout.engine)


def _model(model: ModelConfig) -> dict[str, ExternalInput]:
    """The user's model directory."""
    path = local_path(model.path)
    return {"model": ExternalInput(path, "model.path")} if path else {}


def _reward(reward: RewardConfig) -> dict[str, ExternalInput]:
    """The user's reward files, and the directories of the models that judge."""
    files = {
        path.removeprefix("rl."): ExternalInput(part.file, f"{path}.function", is_script=True)
        for path, part in reward.parts.items()
        if part.file
    }
    models = {
        f"reward.{name}": ExternalInput(directory, f"rl.reward.{name}.path")
        for name, model in reward.models.items()
        if (directory := local_path(model.path))
    }
    return {**files, **models}
