"""The declaration of a stage: name, configuration, plugins, external files and rules.

All of a stage's configuration counts for its fingerprint, except `NotIdentity` fields and local
paths. Functions return the user's files and directories that several stages read.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field

from engines.config.algorithm import RewardConfig
from engines.config.backends import ENGINES
from engines.config.base import StrictModel, local_path
from engines.config.model import ModelConfig
from engines.config.plugins import (
    ROLLOUT_ENGINES,
    PluginKind,
    is_embedded,
    plugin_modules,
)
from engines.config.rollout import RolloutConfig
from engines.config.sections import CheckpointConfig
from engines.config.training import HardwareConfig, TrainingConfig, check_layout
from hardware.detection import create
from hardware.platforms import repair_modules

if TYPE_CHECKING:
    from engines.config.recipe import Recipe

REWARD_MODEL = "reward.model"
"""Input name of the reward model, wherever it comes from."""


@dataclass(frozen=True)
class ExternalInput:
    """Something from outside the pipeline that a stage reads.

    Attributes:
        setting: recipe setting that names it, for error messages.
        is_script: a Python file; it counts with the modules beside it that it imports.
    """

    path: Path
    setting: str
    is_script: bool = False


def model_input(model: ModelConfig | None) -> dict[str, ExternalInput]:
    """Return the user's model directory, if it is local."""
    path = local_path(model.path) if model else None
    return {"model": ExternalInput(path, "model.path")} if path else {}


def reward_inputs(reward: RewardConfig) -> dict[str, ExternalInput]:
    """Return the user's reward files and the local directories of the scoring models."""
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


InputT = TypeVar("InputT")
ConfigT = TypeVar("ConfigT")


def needed(section: ConfigT | None, what: str) -> ConfigT:
    """Return a section of a recipe; raise ValueError if it is None."""
    if section is None:
        raise ValueError(f"the recipe has no {what}")
    return section


class Runtime(StrictModel):
    """Settings of a job that cannot change its output and are not part of the fingerprint."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    progress_deadlines_s: dict[str, float] = {}
    """Progress deadline in seconds by phase; a missing phase keeps its default."""


class StageConfig(StrictModel):
    """Base of stage configurations; the job of a stage is `engines.jobs.<stage>`."""

    stage: ClassVar[str]
    """Kind of stage, and the name of its job's module."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the artifacts that its job reads."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Names of artifacts that its job reads if the flow has them."""
    options: ClassVar[type[StrictModel] | None] = None
    """Schema of `stages.<stage>` in a recipe, for a stage without a section of its own."""
    labelled_by: ClassVar[str] = ""
    """Name of the field whose value, unless empty, is appended to the label; empty: no field."""

    @classmethod
    def options_of(cls, recipe: "Recipe") -> Any:
        """Return the recipe's settings of this stage; None if unset. Raises `ConfigError`."""
        given = recipe.stages.get(cls.stage)
        if given is None or cls.options is None:
            return None
        return cls.options.validated(given, f"stages.{cls.stage}")

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Return the artifacts in `given` that the job reads, by input name."""
        return {name: given[name] for name in (*self.needs, *self.takes) if name in given}

    @property
    def rows(self) -> tuple[str, ...]:
        """Kinds of rows of the recipe's data that it reads: `sft`, `preference`, `rl`, ..."""
        return ()

    @property
    def job_module(self) -> str:
        """The job's main module."""
        return f"engines.jobs.{self.stage}"

    @property
    def label(self) -> str:
        """Name of this stage within a run."""
        part = getattr(self, self.labelled_by) if self.labelled_by else None
        return f"{self.stage}_{part}" if part else self.stage

    @property
    def interpreter(self) -> Path | None:
        """Path of the Python that runs the job; None: the project's own."""
        return None

    @property
    def rollout_interpreter(self) -> Path | None:
        """Path of the Python that runs rollout replicas; None: the job's, or no replicas."""
        return None

    @property
    def driver_resources(self) -> Mapping[str, Any]:
        """Keyword arguments of `ray.remote` for the job's driver.

        Empty if the driver and its other processes must start together: else drivers that hold a
        part and wait for the rest could block each other.
        """
        return {"num_cpus": 1}

    @property
    def num_previous_steps(self) -> int:
        """Steps of earlier stages, from which its journal continues to count."""
        return 0

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Yield the kind and name of every part that the configuration names."""
        yield from ()

    def plugin_modules(self) -> tuple[str, ...]:
        """Return the sorted plugin modules, whose sources are part of the fingerprint."""
        return plugin_modules(self.plugins())

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return external files and models to read, by input name; `given` names the artifacts."""
        return {}

    def check(self) -> None:
        """Refuse inconsistent settings with `ConfigError`; called by the recipe and the job."""


class ComputingStageConfig(StageConfig):
    """Base of stages whose numbers depend on the device."""

    hardware: HardwareConfig = HardwareConfig()

    @property
    def driver_computes(self) -> bool:
        """True if the driver computes on a device, which Ray reserves for it."""
        return True

    @property
    def driver_resources(self) -> Mapping[str, Any]:
        """A CPU, and a device of a known platform, if the driver computes; else empty."""
        if not self.driver_computes:
            return {}
        platform = self.hardware.platform
        device = {} if platform == "auto" else create(platform).ray_resource_options(1)
        return {**super().driver_resources, **device}

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Yield the platform; `auto`, before a plan resolves it, is no plugin."""
        yield "platform", self.hardware.platform


class RolloutStageConfig(ComputingStageConfig):
    """Base of stages with rollout engines."""

    rollout: RolloutConfig

    @property
    def rollout_interpreter(self) -> Path | None:
        """Path of the Python that runs rollout replicas; None: the job's, or no replicas."""
        engine = self.rollout.engine
        return None if is_embedded(self.rollout) else ROLLOUT_ENGINES.interpreter(engine)

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also yield the rollout engine."""
        yield from super().plugins()
        yield "rollout", self.rollout.engine


class BackendStageConfig(ComputingStageConfig):
    """Base of stages that use a training backend or read its checkpoints."""

    @property
    def training_backend(self) -> str | None:
        """Name of the backend; None: the stage uses none."""
        raise NotImplementedError

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also yield the training backend."""
        yield from super().plugins()
        if self.training_backend:
            yield "backend", self.training_backend

    def plugin_modules(self) -> tuple[str, ...]:
        """Also return the modules that repair the backend on this platform."""
        return (
            *super().plugin_modules(),
            *repair_modules(self.hardware.platform, self.training_backend),
        )


class TrainingStageConfig(BackendStageConfig):
    """Base of stages that train a policy or a reward model."""

    model: ModelConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig

    @property
    def training_backend(self) -> str:
        """Backend of the training ranks."""
        return self.training.backend

    @property
    def driver_computes(self) -> bool:
        """True for a single rank, which is the driver itself."""
        return self.training.num_workers == 1

    @property
    def interpreter(self) -> Path | None:
        """Path of the Python that the training backend needs; None: the project's own."""
        return ENGINES.interpreter(self.training.backend, "training.backend")

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Return the model, if no stage before this one trained a policy."""
        return {} if "policy" in given else model_input(self.model)

    def check(self) -> None:
        """Check that the backend supports the layout."""
        check_layout(self.training)
