"""The declaration of a stage: name, configuration, plugins, external files and rules.

All of a stage's configuration enters its fingerprint, but for the fields marked `NotIdentity`.
What a job needs without being configured by a recipe stands in `Runtime`.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from engines.config.backends import check_layout, job_interpreter
from engines.config.base import StrictModel
from engines.config.model import ModelConfig
from engines.config.plugins import (
    ROLLOUT_ENGINES,
    PluginKind,
    is_embedded,
    named_rows,
    plugin_modules,
)
from engines.config.rollout import RolloutConfig
from engines.config.sections import (
    CheckpointConfig,
)
from engines.config.stages.inputs import ExternalInput
from engines.config.training import HardwareConfig, TrainingConfig
from hardware.detection import create
from hardware.platforms import repair_modules
from infra.field_errors import to_config_error

if TYPE_CHECKING:
    from engines.config.recipe import Recipe

InputT = TypeVar("InputT")


class Runtime(StrictModel):
    """Settings of a job that cannot change its output; they are not part of the fingerprint."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    progress_deadlines_s: dict[str, float] = {}
    """Progress deadline by phase; a phase that is left out keeps its own."""


class StageConfig(StrictModel):
    """One stage. Its job is `engines.jobs.<stage>`."""

    stage: ClassVar[str]
    """Kind of stage, and the name of its job's module."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Artifacts that its job reads, by the names that the job knows them by."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Artifacts that its job reads where a flow has them."""
    options: ClassVar[type[StrictModel] | None] = None
    """Schema of `stages.<stage>` in a recipe, for a stage without a section of its own."""

    @classmethod
    def options_of(cls, recipe: "Recipe") -> Any:
        """Return what the recipe sets for this stage as `options`; None if it sets nothing.

        Raises:
            ConfigError: a setting is unknown or has a wrong value.
        """
        given = recipe.stages.get(cls.stage)
        if given is None or cls.options is None:
            return None
        try:
            return cls.options.model_validate(given)
        except ValidationError as error:
            raise to_config_error(error, cls.options, f"stages.{cls.stage}") from None

    def inputs(self, given: Mapping[str, InputT]) -> dict[str, InputT]:
        """Select the artifacts that the job reads.

        Args:
            given: artifacts by name.

        Returns:
            What the job is given; the rest is left out.
        """
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
        """Resources that Ray reserves for the job's driver, as keyword arguments of `ray.remote`.

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
        """Targets of the named plugins, with the facts of their rows that can change numbers."""
        return [row.counted for row in named_rows(self.plugins())]

    def plugin_modules(self) -> tuple[str, ...]:
        """Modules of the named plugins, sorted; their sources are part of the fingerprint."""
        return plugin_modules(self.plugins())

    def external_inputs(self, given: Collection[str]) -> Mapping[str, ExternalInput]:
        """Files and models that the job reads and no stage made.

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


class ComputingStageConfig(StageConfig):
    """Base of stages whose numbers depend on the device."""

    hardware: HardwareConfig = HardwareConfig()

    @property
    def driver_computes(self) -> bool:
        """True if the driver computes on a device, which is reserved when it starts."""
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
        """The platform; `auto`, before a plan has resolved it, is no plugin."""
        yield "platform", self.hardware.platform


class BackendStageConfig(ComputingStageConfig):
    """Base of stages that use a training backend, or read its checkpoints."""

    @property
    def training_backend(self) -> str | None:
        """Its name; None: there is none."""
        raise NotImplementedError

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """Also the training backend."""
        yield from super().plugins()
        if self.training_backend:
            yield "backend", self.training_backend

    def plugin_modules(self) -> tuple[str, ...]:
        """Also the modules that repair the backend on this platform."""
        repairs = repair_modules(self.hardware.platform, self.training_backend)
        return (*super().plugin_modules(), *repairs)


class TrainingStageConfig(BackendStageConfig):
    """Base of stages that train a policy."""

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
        """Python of the training backend's job environment."""
        return job_interpreter(self.training.backend, "training.backend")

    def check(self) -> None:
        """The backend has the layout."""
        check_layout(self.training)


def interpreter_of(rollout: RolloutConfig) -> Path | None:
    """Return the Python of rollout replicas; None: that of the job, or there are no replicas."""
    if is_embedded(rollout):
        return None
    return ROLLOUT_ENGINES.interpreter(rollout.engine)
