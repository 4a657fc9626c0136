"""The recipe: one strict, frozen description of a whole pipeline run.

Promises: unknown keys are refused and each section's own rules hold. Stage configurations are made
from the recipe alone. No stage reads the thresholds of `DiagnosisConfig`; a rejected round changes
the policy that the next stage gets as an input.
Does not promise: that sections agree; `load_recipe` checks that.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from engines.config.base import Refusals, StrictModel
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
from infra import env
from infra.store.canonical import sha256_json

RoundSymptom = Literal[
    "drift",
    "entropy_collapse",
    "kl_runaway",
    "length_explosion",
    "no_signal",
    "reward_collapse",
    "reward_hacking",
]
"""Symptoms of RL rounds; each is a pure function of what the stages committed."""


class DiagnosisConfig(StrictModel):
    """Thresholds of `rlhf diagnose` and of a run's page; they are part of no fingerprint.

    A curve is compared by window means: the last window with the first or the best one.
    """

    window_num_steps: int = Field(default=5, ge=1)
    """Steps of a window; a curve shorter than two windows is not judged."""
    memory_growth: float = Field(default=1.5, gt=1)
    """Largest ratio of the peak memory in the last window to the first."""
    sync_share: float = Field(default=0.3, gt=0, lt=1)
    """Largest share of the median step that passes until new weights are served."""
    unnamed_share: float = Field(default=0.3, gt=0, lt=1)
    """Largest share of the median step that belongs to no phase, that is, waiting."""
    entropy_ratio: float = Field(default=0.2, gt=0, lt=1)
    """Smallest ratio of the entropy in the last window to the first; below it, entropy collapsed,
    unless nearly every answer has the best score: then the task is solved."""
    length_growth: float = Field(default=2.0, gt=1)
    """Largest growth of answer length from first to last window; healthy if the score rises."""
    cut_share: float = Field(default=0.3, gt=0, le=1)
    """Share of answers cut at the limit above which growth in length is no gain."""
    max_kl: float = Field(default=0.5, gt=0)
    """Largest KL per token in nats, to the reference, or without one to the sampler."""
    score_fall: float = Field(default=0.3, gt=0, lt=1)
    """Largest fall of the score from its best window, as a share of that score."""
    hacking_gain: float = Field(default=0.05, gt=0)
    """Gain in training score that makes a fall of the held-out accuracy reward hacking."""
    hacking_fall: float = Field(default=0.03, gt=0, lt=1)
    """Fall of the held-out accuracy from its best evaluation that counts as reward hacking."""
    mismatch_growth: float = Field(default=3.0, gt=1)
    """Largest ratio of the sampler-trainer mismatch in the last window to the first."""
    mismatch_floor: float = Field(default=1e-5, gt=0)
    """Mismatch in nats below which it is only rounding."""
    skipped_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of a window's steps that trained on nothing."""
    end_run: tuple[RoundSymptom, ...] = ()
    """Symptoms of a finished round that end the run with an error."""
    reject_round: tuple[RoundSymptom, ...] = ()
    """Symptoms that make later stages continue from the policy before the round."""

    def _refusals(self) -> Refusals:
        for symptom in sorted(self.end_run):
            yield (
                symptom in self.reject_round,
                f"reject_round: got {symptom}, which end_run has too; name it in one",
            )


ModelT = TypeVar("ModelT", bound=StrictModel)

MODEL_SETTINGS = (
    "model.path", "rl.reward.model.path", "rl.reward.judge.path", "rl.distillation.path",
    "against.path",
)  # fmt: skip
"""Settings that name a model: a directory, a hub id, or an alias (`models:/NAME@ALIAS`)."""
NOT_IDENTITY = {"diagnosis", "location", "progress_deadlines_s", "target"}
"""Sections that are part of no fingerprint."""


class MergeConfig(StrictModel):
    """How the last policy is written as a Hugging Face directory."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    max_shard_bytes: int = Field(default=5_000_000_000, ge=1024)
    """Limit in bytes of a safetensors file and of merging's memory; a larger tensor exceeds it."""


class ProgressDeadlines(StrictModel):
    """Seconds without progress after which a job is ended and the stacks of its threads are kept.

    Null keeps the default of the phase. A phase is what a job reports with `Heartbeat.enter`.
    """

    load: float | None = Field(default=None, gt=0)
    """Verifying the inputs and building the model."""
    preprocess: float | None = Field(default=None, gt=0)
    """Reading and tokenizing the data."""
    train: float | None = Field(default=None, gt=0)
    """One step, including the generation in RL."""
    merge: float | None = Field(default=None, gt=0)
    """Writing the whole model."""
    evaluate: float | None = Field(default=None, gt=0)
    """Generating and scoring."""
    publish: float | None = Field(default=None, gt=0)
    """Adding the output to the store."""


class TargetConfig(StrictModel):
    """Published result that the recipe should reach; only reports show it."""

    metric: str = Field(min_length=1)
    """Metric of the final evaluation, as `promote.metric` names it."""
    data_set: str = Field(min_length=1)
    """The data set and the part of it."""
    value: float | None = None
    """Published value, in [0, 1] for accuracies; null: the source gives only a curve or text."""
    source: str = Field(min_length=1)
    """Paper or page, and the place in it."""


class LocationConfig(StrictModel):
    """Directories and services of a run; none of them is part of a fingerprint."""

    home: str | None = None
    """Directory of the store, work files and reports; null uses RLHF_HOME."""
    store: str | None = None
    """Artifact store, as a directory or a URI; null uses `<home>/store`."""
    tracker: str = "mlflow"
    """Tracker that shows the runs."""
    mirrors: tuple[str, ...] = ()
    """Additional trackers of the same data: `tensorboard` (`<home>/tensorboard`), `wandb`."""
    tracking_uri: str | None = None
    """MLflow server or database; null uses MLFLOW_TRACKING_URI, else `<home>/mlflow.db`."""
    experiment: str = "rlhf"
    """MLflow experiment, and Weights & Biases project."""

    def _refusals(self) -> Refusals:
        trackers = (self.tracker, *self.mirrors)
        for name in trackers:
            yield (
                trackers.count(name) > 1,
                f"mirrors: got {name} twice; need each tracker once; remove one",
            )

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
    """One pipeline run: data, model, and the settings of every stage."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the recipe; part of the run's name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of all randomness of the run."""
    model: ModelConfig
    data: DataConfig | None = None
    """null is for recipes that train nothing and only measure the suites."""
    training: TrainingConfig = TrainingConfig()
    rollout: RolloutConfig = RolloutConfig()
    sft: SFTConfig | None = SFTConfig()
    """Supervised fine-tuning; null skips it, so that training starts from the model itself."""
    reward_model: RewardTrainingConfig | None = None
    """Train a reward model on `data.preference`, for a pathless `rl.reward.model`; null: none."""
    preference: PreferenceConfig | None = None
    """Train the policy on `data.preference` before RL (DPO and its family); null skips it."""
    rl: RLConfig = RLConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    suites: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")], SuiteConfig] = {}
    """Further held-out sets for the final model, by a name of your choice. In a recipe file a value
    may be the name of a built-in suite (`rlhf evaluate --help` lists them) or a YAML file."""
    against: ModelConfig | None = None
    """Model that is measured on the same problems as the final one, to compare them; null: none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    merge: MergeConfig = MergeConfig()
    soup: SoupConfig | None = None
    """Evaluate and promote the mean of several policies; null: use the last policy."""
    promote: PromoteConfig = PromoteConfig()
    target: TargetConfig | None = None
    """Published result that the recipe should reach; null: none."""
    stages: dict[str, dict[str, Any]] = {}
    """Settings of added stages that have no section here, by stage name."""
    hardware: HardwareConfig = HardwareConfig()
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    progress_deadlines_s: ProgressDeadlines = ProgressDeadlines()
    location: LocationConfig = LocationConfig()

    @property
    def run_name(self) -> str:
        """Name of this run; recipes that differ only in `NOT_IDENTITY` sections share it."""
        identity = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        return f"{self.name}-seed{self.seed}-{sha256_json(identity)[:8]}"

    @property
    def asks_reward_model(self) -> bool:
        """True if the reward model that this run trains scores answers."""
        return self.rl.reward.model is not None and self.rl.reward.model.path is None

    @property
    def trains(self) -> bool:
        """True if any stage trains a policy; else the run only measures the model."""
        return bool(self.sft or self.preference or self.rl.num_rounds)

    @property
    def keeps_average(self) -> bool:
        """True if a stage commits a moving average of its weights."""
        trained = (self.sft, self.reward_model, self.preference, self.rl.num_rounds and self.rl)
        return any(section.optimizer.ema for section in trained if section)

    @property
    def data_suites(self) -> dict[str, DataConfig]:
        """Data of the suites that have held-out data, by suite."""
        return {name: suite.data for name, suite in self.suites.items() if suite.data}

    @property
    def harness_suites(self) -> dict[str, HarnessConfig]:
        """Tasks of the suites that use a harness, by suite."""
        return {name: suite.harness for name, suite in self.suites.items() if suite.harness}

    @property
    def home(self) -> Path:
        """Absolute path of the home."""
        return self.location.home_directory

    @property
    def store_uri(self) -> str:
        """URI or absolute path of the artifact store."""
        return self.location.store_uri

    @property
    def preference_iterations(self) -> Sequence[int | None]:
        """Numbers of the self-play iterations; None stands for training on given pairs."""
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
        """Return a copy with each model name replaced by `rename(setting, value)`."""
        recipe = self
        for setting, value in self.models():
            recipe = _replaced(recipe, setting.split("."), rename(setting, value))
        return recipe


def _replaced(config: ModelT, names: Sequence[str], value: str) -> ModelT:
    first, *rest = names
    inner = _replaced(getattr(config, first), rest, value) if rest else value
    return config.model_copy(update={first: inner})
