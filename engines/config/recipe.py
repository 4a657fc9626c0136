"""The recipe: one strict, frozen description of a whole pipeline run.

Promises: unknown keys are refused; each section's own rules hold. The configuration of a stage is
made from the recipe alone (`from_recipe` in `engines.config.stages`).
Does not promise: that sections agree with each other; `flows.recipe.recipe.load_recipe` checks it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.diagnosis import DiagnosisConfig
from engines.config.model import ModelConfig
from engines.config.rollout import RolloutConfig
from engines.config.sections import (
    CheckpointConfig,
    EvaluationConfig,
    PreferenceConfig,
    PromoteConfig,
    RewardTrainingConfig,
    RLConfig,
    SFTConfig,
    SoupConfig,
)
from engines.config.suite import HarnessConfig, SuiteConfig
from engines.config.training import HardwareConfig, TrainingConfig
from infra import env
from infra.store.canonical import sha256_json

ModelT = TypeVar("ModelT", bound=StrictModel)

RUN_NAME_DIGITS = 8
SUITE_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
MODEL_SETTINGS = (
    "model.path", "rl.reward.model.path", "rl.reward.judge.path", "rl.distillation.path",
    "against.path",
)  # fmt: skip
"""Settings that name a model: a directory, a hub id, or an alias (`models:/NAME@ALIAS`)."""
NOT_IDENTITY = {"diagnosis", "location", "progress_deadlines_s", "target"}
"""Sections that are part of no fingerprint."""


class MergeConfig(StrictModel):
    """The Hugging Face directory that the last policy is written to."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    """Largest size of one safetensors file, and of what merging holds in memory."""


class ProgressDeadlines(StrictModel):
    """Seconds without progress after which a job is ended with its stacks; null: the phase's own.

    A phase is what a job says on its heartbeat (`Heartbeat.enter`).
    """

    load: float | None = Field(default=None, gt=0)
    """Verifying the inputs and building the model."""
    preprocess: float | None = Field(default=None, gt=0)
    """Reading and tokenizing the data."""
    train: float | None = Field(default=None, gt=0)
    """One step, a generation of RL included."""
    merge: float | None = Field(default=None, gt=0)
    """Writing the whole model."""
    evaluate: float | None = Field(default=None, gt=0)
    """Generating and scoring."""
    publish: float | None = Field(default=None, gt=0)
    """Taking the output into the store."""


class TargetConfig(StrictModel):
    """Published result for the setting of the recipe; only reports show it.

    `promote` decides what is registered.
    """

    metric: str = Field(min_length=1)
    """Metric of the final evaluation, as `promote.metric` names it."""
    data_set: str = Field(min_length=1)
    """The data set, and which part of it."""
    value: float | None = None
    """Published value, in [0, 1] for accuracies; null: the source gives only a curve or words."""
    source: str = Field(min_length=1)
    """Paper or page, and the place in it."""


class LocationConfig(StrictModel):
    """Directories and services of a run; they are not part of any fingerprint."""

    home: str | None = None
    """Directory of the store, work files and reports; null uses RLHF_HOME."""
    store: str | None = None
    """Artifact store, a directory or a URI; null uses `<home>/store`."""
    tracker: str = "mlflow"
    """Tracker that shows the runs."""
    mirrors: tuple[str, ...] = ()
    """Further trackers that get the same: `tensorboard` (`<home>/tensorboard`), `wandb`."""
    tracking_uri: str | None = None
    """MLflow server or database; null uses MLFLOW_TRACKING_URI, else `<home>/mlflow.db`."""
    experiment: str = "rlhf"
    """MLflow experiment, and project of Weights & Biases."""

    @model_validator(mode="after")
    def _check_mirrors(self) -> "LocationConfig":
        told = (self.tracker, *self.mirrors)
        twice = next((name for name in told if told.count(name) > 1), None)
        if twice:
            raise ValueError(f"mirrors: got {twice} twice; need each tracker once, one removed")
        return self

    @property
    def home_directory(self) -> Path:
        """Absolute path of the home."""
        return env.absolute_home("location.home", self.home) if self.home else env.home()

    @property
    def store_uri(self) -> str:
        """URI or absolute path of the store."""
        store = self.store or str(self.home_directory / "store")
        return store if "://" in store else str(env.absolute_home("location.store", store))


class Recipe(StrictModel):
    """One pipeline run: data, model, and what every stage does with them."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the recipe; part of the run's name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """All randomness of the run derives from it."""
    model: ModelConfig
    data: DataConfig | None = None
    """null, where nothing trains: the suites alone are measured."""
    training: TrainingConfig = TrainingConfig()
    rollout: RolloutConfig = RolloutConfig()
    sft: SFTConfig | None = SFTConfig()
    """null starts RL from the model itself."""
    reward_model: RewardTrainingConfig | None = None
    """Train a reward model on `data.preference`, for an `rl.reward.model` without a path; null:
    none."""
    preference: PreferenceConfig | None = None
    """Train the policy on `data.preference` before RL (DPO and its family); null: not."""
    rl: RLConfig = RLConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    suites: dict[Annotated[str, Field(pattern=SUITE_NAME)], SuiteConfig] = {}
    """Further held-out sets for the final model, by a name of your choice. In a recipe's file each
    may be the name of one that ships (`rlhf evaluate --help` lists them), or of a YAML file."""
    against: ModelConfig | None = None
    """A model that the final one is compared with, problem by problem, on all that it is measured
    on; null: none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    merge: MergeConfig = MergeConfig()
    soup: SoupConfig | None = None
    """Evaluate and promote the mean of several policies; null: the last one."""
    promote: PromoteConfig = PromoteConfig()
    target: TargetConfig | None = None
    """Published result that the recipe should reach; null: there is none."""
    stages: dict[str, dict[str, Any]] = {}
    """Settings of added stages that have no section here, by stage."""
    hardware: HardwareConfig = HardwareConfig()
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    progress_deadlines_s: ProgressDeadlines = ProgressDeadlines()
    location: LocationConfig = LocationConfig()

    @property
    def run_name(self) -> str:
        """Name of this run: equal recipes share it, whatever directory they use."""
        identity = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        return f"{self.name}-seed{self.seed}-{sha256_json(identity)[:RUN_NAME_DIGITS]}"

    @property
    def asks_reward_model(self) -> bool:
        """True if the reward model that the run trains scores answers."""
        return self.rl.reward.model is not None and self.rl.reward.model.path is None

    @property
    def trains(self) -> bool:
        """True if some stage trains a policy; else the run only measures the model."""
        return bool(self.sft or self.preference or self.rl.num_rounds)

    @property
    def keeps_average(self) -> bool:
        """True if a stage commits a moving average of its weights."""
        rl = self.rl if self.rl.num_rounds else None
        sections = (self.sft, self.reward_model, self.preference, rl)
        return any(section.optimizer.ema for section in sections if section)

    @property
    def data_suites(self) -> dict[str, DataConfig]:
        """Held-out data by suite, of those that have some."""
        return {name: suite.data for name, suite in self.suites.items() if suite.data}

    @property
    def harness_suites(self) -> dict[str, HarnessConfig]:
        """Tasks by suite, of those that a harness asks."""
        return {name: suite.harness for name, suite in self.suites.items() if suite.harness}

    @property
    def home(self) -> Path:
        """Absolute path of the directory that keeps store, work files and reports."""
        return self.location.home_directory

    @property
    def store_uri(self) -> str:
        """URI or absolute path of the artifact store."""
        return self.location.store_uri

    @property
    def preference_iterations(self) -> Sequence[int | None]:
        """Numbers of the iterations of self-play; None is preference training on given pairs."""
        if self.preference is None:
            return ()
        section = self.preference.self_play
        return (None,) if section is None else range(1, section.num_iterations + 1)

    def models(self) -> Iterator[tuple[str, str]]:
        """Yield each setting that names a model, with its value; unset ones are left out."""
        for setting in MODEL_SETTINGS:
            value: Any = self
            for name in setting.split("."):
                value = None if value is None else getattr(value, name)
            if value is not None:
                yield setting, value

    def with_models(self, rename: Callable[[str, str], str]) -> "Recipe":
        """Return a copy whose models are named by `rename(setting, value)`."""
        recipe = self
        for setting, value in self.models():
            recipe = _replaced(recipe, setting.split("."), rename(setting, value))
        return recipe


def _replaced(config: ModelT, names: Sequence[str], value: str) -> ModelT:
    first, *rest = names
    inner = _replaced(getattr(config, first), rest, value) if rest else value
    return config.model_copy(update={first: inner})
