"""What a stage is: a name, a configuration, plugins, files of the user's and rules, declared once.

All of a stage's configuration enters its fingerprint, but for the fields marked `NotIdentity`.
What a job needs without being configured by a recipe stands in `Runtime`.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

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


class Runtime(StrictModel):
    """What a job needs to run but that cannot change its output; outside the fingerprint."""

    heartbeat_s: float = Field(default=2.0, gt=0)
    progress_deadlines_s: dict[str, float] = {}
    """By phase, instead of the deadline that the phase declares itself."""


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


class BackendStageConfig(ComputingStageConfig):
    """What the stages share that compute by a training backend, or read what one wrote."""

    @property
    def training_backend(self) -> str | None:
        """Its name; None: there is none."""
        raise NotImplementedError

    def plugins(self) -> Iterator[tuple[PluginKind, str]]:
        """And the training backend."""
        yield from super().plugins()
        if self.training_backend:
            yield "backend", self.training_backend

    def plugin_modules(self) -> tuple[str, ...]:
        """And what the backend needs on this platform."""
        repairs = repair_modules(self.hardware.platform, self.training_backend)
        return (*super().plugin_modules(), *repairs)


class TrainingStageConfig(BackendStageConfig):
    """What the stages that train a policy share."""

    model: ModelConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig

    @property
    def training_backend(self) -> str:
        """Of the ranks."""
        return self.training.backend

    @property
    def driver_computes(self) -> bool:
        """Of one rank."""
        return self.training.num_workers == 1

    @property
    def interpreter(self) -> Path | None:
        """Of the training backend."""
        return job_interpreter(self.training.backend, "training.backend")

    def check(self) -> None:
        """The backend has the layout."""
        check_layout(self.training)


def interpreter_of(rollout: RolloutConfig) -> Path | None:
    """Python that replicas need; None: the job's, or there are none."""
    if is_embedded(rollout):
        return None
    return ROLLOUT_ENGINES.interpreter(rollout.engine)
