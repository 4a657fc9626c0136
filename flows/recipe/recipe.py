"""The recipe: one strict, frozen description of a whole pipeline run.

Promises: `load_recipe` either returns a recipe whose fields agree with each other, or raises one
`ConfigError` line in well under a second, without torch. The recipe's stage configurations are
exactly what the stages' fingerprints are made from.
Does not promise: that data and models are well formed inside; the jobs check that in preflight.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from engines.config.base import StrictModel
from engines.config.data import DataConfig
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
from flows.recipe import stage_configs
from flows.recipe.diagnosis import DiagnosisConfig
from flows.recipe.local_paths import with_absolute_paths
from flows.recipe.secrets import refuse_secrets
from flows.recipe.source import read_recipe
from flows.recipe.target import TargetConfig
from flows.recipe.validation import check_recipe
from infra import env
from infra.field_errors import to_config_error
from infra.store.canonical import sha256_json

RUN_NAME_DIGITS = 8
SUITE_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
NOT_IDENTITY = {"diagnosis", "location", "progress_deadlines_s", "target"}
"""Sections that change no stage."""


class MergeConfig(StrictModel):
    """The Hugging Face directory that the last policy becomes."""

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


class LocationConfig(StrictModel):
    """Where a run keeps things. Changing these re-runs nothing that the new place already holds."""

    home: str | None = None
    """Directory of the store, work files and reports; null uses RLHF_HOME."""
    store: str | None = None
    """Artifact store, a directory or a URI; null uses `<home>/store`."""
    tracker: str = "mlflow"
    """Where runs are shown."""
    mirrors: tuple[str, ...] = ()
    """Further trackers that are told the same: `tensorboard` (`<home>/tensorboard`), `wandb`."""
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
    """What a recipe in a published size has to reach; null: nothing was published for it."""
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
        """Whether answers are judged by the reward model that the run itself trains."""
        return self.rl.reward.model is not None and self.rl.reward.model.path is None

    @property
    def trains(self) -> bool:
        """Whether some stage trains a policy; else the model itself is measured."""
        return bool(self.sft or self.preference or self.rl.num_rounds)

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
        """Directory of everything a run keeps, absolute."""
        home = self.location.home
        return env.absolute_home("location.home", home) if home else env.home()

    @property
    def store_uri(self) -> str:
        """The artifact store."""
        store = self.location.store or str(self.home / "store")
        return store if "://" in store else str(env.absolute_home("location.store", store))

    @property
    def preference_iterations(self) -> Sequence[int | None]:
        """Numbers of the iterations of self-play; None is preference training on given pairs."""
        if self.preference is None:
            return ()
        section = self.preference.self_play
        return (None,) if section is None else range(1, section.num_iterations + 1)

    # The configuration of each stage, by the stage's name.
    preprocess_stage = stage_configs.preprocess_stage
    preprocess_suite_stage = stage_configs.preprocess_suite_stage
    sft_stage = stage_configs.sft_stage
    reward_model_stage = stage_configs.reward_model_stage
    self_play_stage = stage_configs.self_play_stage
    preference_stage = stage_configs.preference_stage
    rl_round_stage = stage_configs.rl_round_stage
    merge_stage = stage_configs.merge_stage
    soup_stage = stage_configs.soup_stage
    evaluate_stage = stage_configs.evaluate_stage
    against_stage = stage_configs.against_stage
    compare_stage = stage_configs.compare_stage
    evaluate_suite_stage = stage_configs.evaluate_suite_stage
    harness_stage = stage_configs.harness_stage
    promote_stage = stage_configs.promote_stage
    stages = stage_configs.stages


def parse_recipe(data: Any) -> Recipe:
    """Validate plain data as a recipe.

    Args:
        data: nested mappings, as YAML or JSON gives them.

    Returns:
        The recipe; its fields agree with each other.

    Raises:
        ConfigError: one line about what is wrong.
    """
    refuse_secrets(data)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise to_config_error(error, Recipe) from None
    return prepare_recipe(recipe)


def prepare_recipe(recipe: Recipe) -> Recipe:
    """Check a recipe's fields against each other, and make its local paths absolute.

    Args:
        recipe: a recipe whose fields are valid one by one, as a Prefect parameter is.

    Returns:
        The recipe that runs.

    Raises:
        ConfigError: one line about what is wrong.
    """
    check_recipe(recipe)
    return with_absolute_paths(recipe)


def load_recipe(
    name_or_path: str, overrides: Sequence[str] = (), *, seed: int | None = None
) -> Recipe:
    """Load, overlay and validate a recipe.

    Args:
        name_or_path: a shipped name (`quickstart`) or a YAML file.
        overrides: `path.to.key=value`, applied in order, the value in YAML.
        seed: replaces the recipe's seed; None keeps it.

    Returns:
        The recipe.

    Raises:
        ConfigError: one line about what is wrong.
    """
    data = read_recipe(name_or_path, overrides)
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(data)
