"""The recipe: one strict, frozen description of a whole pipeline run.

Promises: `load_recipe` either returns a recipe whose fields agree with each other, or raises one
`ConfigError` line in well under a second, without torch. The recipe's stage configurations are
exactly what the stages' fingerprints are made from.
Does not promise: that data and models are well formed inside; the jobs check that in preflight.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from engines.config.algorithm import RewardConfig
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
from engines.config.stages.base import StageConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import (
    CompareStageConfig,
    EvaluateStageConfig,
    MergeStageConfig,
    PromoteStageConfig,
    SoupStageConfig,
)
from engines.config.stages.harness import HarnessStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
from engines.config.suite import HarnessConfig, SuiteConfig
from engines.config.training import HardwareConfig, TrainingConfig
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
AGAINST = "against"
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

    def preprocess_stage(self) -> PreprocessStageConfig:
        """Configuration of the stage `preprocess`; the recipe must have data."""
        if self.data is None:
            raise ValueError("the recipe has no data")
        return PreprocessStageConfig(data=self.data, model=self.model)

    def preprocess_suite_stage(self, name: str) -> PreprocessStageConfig:
        """Configuration of the stage `preprocess` of a suite: rows of any model."""
        return PreprocessStageConfig(of=name, data=self.data_suites[name])

    def sft_stage(self) -> SFTStageConfig:
        """Configuration of the stage `sft`; the recipe must have one."""
        if self.sft is None:
            raise ValueError("the recipe has no SFT stage")
        return SFTStageConfig(
            model=self.model,
            training=self.training,
            sft=self.sft,
            checkpoint=self.checkpoint,
            hardware=self.hardware,
        )

    def reward_model_stage(self) -> RewardModelStageConfig:
        """Configuration of the stage `reward_model`; the recipe must have one."""
        if self.reward_model is None:
            raise ValueError("the recipe has no reward model stage")
        return RewardModelStageConfig(
            model=self.model,
            # An adapter is the policy's: all of a reward model is trained.
            training=self.training.model_copy(update={"lora": None}),
            reward_model=self.reward_model,
            max_shard_bytes=self.merge.max_shard_bytes,
            checkpoint=self.checkpoint,
            hardware=self.hardware,
        )

    @property
    def preference_iterations(self) -> Sequence[int | None]:
        """Numbers of the iterations of self-play; None is preference training on given pairs."""
        if self.preference is None:
            return ()
        section = self.preference.self_play
        return (None,) if section is None else range(1, section.num_iterations + 1)

    def self_play_stage(self, iteration: int) -> SelfPlayStageConfig:
        """Configuration of the stage `self_play`, counted from 1; the recipe must have one."""
        if self.preference is None or self.preference.self_play is None:
            raise ValueError("the recipe has no self-play")
        section = self.preference.self_play
        return SelfPlayStageConfig(
            iteration=iteration,
            max_length=self.model.max_length,
            self_play=section,
            sampling=section.sampling or self.rl.sampling,
            backend=self.training.backend,
            num_threads=self.training.num_threads,
            dtype=self.training.dtype,
            rollout=self.rollout,
            reward=self.rl.reward if section.source == "best_worst" else RewardConfig(),
            hardware=self.hardware,
        )

    def preference_stage(self, iteration: int | None = None) -> PreferenceStageConfig:
        """Configuration of the stage `preference`; the recipe must have one.

        Args:
            iteration: of self-play; None where there is none.

        Returns:
            The stage.
        """
        if self.preference is None:
            raise ValueError("the recipe has no preference stage")
        return PreferenceStageConfig(
            iteration=iteration,
            model=self.model,
            training=self.training,
            # What the pairs are made of counts for them.
            preference=self.preference.model_copy(update={"self_play": None}),
            checkpoint=self.checkpoint,
            hardware=self.hardware,
        )

    def rl_round_stage(self, number: int) -> RLRoundStageConfig:
        """Configuration of RL round `number`, counted from 1."""
        return RLRoundStageConfig(
            round=number,
            model=self.model,
            training=self.training,
            rollout=self.rollout,
            rl=self.rl,
            checkpoint=self.checkpoint,
            hardware=self.hardware,
        )

    def merge_stage(self, of: str = "") -> MergeStageConfig:
        """Configuration of the stage `merge`.

        Args:
            of: label of the stage whose policy is one of several; empty for the last.

        Returns:
            The stage.
        """
        return MergeStageConfig(
            of=of,
            backend=self.training.backend,
            # A mean is taken of all digits, and rounded once.
            dtype="float32" if of else self.merge.dtype,
            max_shard_bytes=self.merge.max_shard_bytes,
        )

    def soup_stage(self, num_models: int) -> SoupStageConfig:
        """Configuration of the stage `soup`, which averages so many models."""
        return SoupStageConfig(
            num_models=num_models,
            dtype=self.merge.dtype,
            max_shard_bytes=self.merge.max_shard_bytes,
        )

    def evaluate_stage(self, of: str = "") -> EvaluateStageConfig:
        """Configuration of the stage `evaluate` on the recipe's own problems.

        Args:
            of: label of the stage whose policy is evaluated; empty for the final model.

        Returns:
            The stage.
        """
        return self._evaluate_stage(of, self.evaluation, self.rl.reward, made_by_stage=bool(of))

    def against_stage(self, of_final: EvaluateStageConfig) -> EvaluateStageConfig:
        """Configuration of the stage that asks the model `against` what the final one was asked."""
        if self.against is None:
            raise ValueError("the recipe compares with no model")
        found = {
            "of": f"{of_final.of}_{AGAINST}".lstrip("_"),
            "model": _measured(self.against),
            "model_section": AGAINST,
        }
        return of_final.model_copy(update=found)

    def compare_stage(self, suite: str = "") -> CompareStageConfig:
        """Configuration of the stage `compare`, of a suite or of the recipe's own problems."""
        evaluation = self.suites[suite].evaluation if suite else self.evaluation
        return CompareStageConfig(of=suite, confidence=evaluation.confidence)

    def evaluate_suite_stage(self, name: str) -> EvaluateStageConfig:
        """Configuration of the stage `evaluate` of the final model on a suite."""
        suite = self.suites[name]
        stage = self._evaluate_stage(name, suite.evaluation, suite.reward or self.rl.reward)
        return stage.model_copy(update={"suite": name})

    def harness_stage(self, name: str, *, is_against: bool = False) -> HarnessStageConfig:
        """Configuration of the stage `harness`.

        Args:
            name: of a suite that a harness asks.
            is_against: it asks the model `against`, and not the final one.

        Returns:
            The stage.
        """
        own = None if self.trains else self.model
        model = self.against if is_against else own
        return HarnessStageConfig(
            suite=name,
            is_against=is_against,
            hardware=self.hardware,
            num_threads=self.training.num_threads,
            dtype=self.training.dtype,
            rollout=self.rollout,
            model=_measured(model) if model else None,
            harness=self.harness_suites[name],
            confidence=self.evaluation.confidence,
        )

    def _evaluate_stage(
        self,
        of: str,
        evaluation: EvaluationConfig,
        reward: RewardConfig,
        *,
        made_by_stage: bool = False,
    ) -> EvaluateStageConfig:
        # A job sees no more of the recipe, so the length limit is spelled out.
        sampling = self.rl.sampling
        names = ("max_new_tokens", "stop", "stop_token_ids")
        missing = {n: getattr(sampling, n) for n in names if getattr(evaluation, n) is None}
        return EvaluateStageConfig(
            of=of,
            hardware=self.hardware,
            num_threads=self.training.num_threads,
            dtype=self.training.dtype,
            backend=self.training.backend if made_by_stage else None,
            model=None if self.trains else _measured(self.model),
            evaluation=evaluation.model_copy(update=missing),
            rollout=self.rollout,
            reward=reward,
        )

    def promote_stage(self) -> PromoteStageConfig:
        """Configuration of the stage `promote`."""
        return PromoteStageConfig(promote=self.promote)

    def stages(self) -> Iterator[StageConfig]:
        """Every stage that the recipe has, in order; of rounds and iterations, alike, the first."""
        if self.data:
            yield self.preprocess_stage()
        if self.sft:
            yield self.sft_stage()
        if self.reward_model:
            yield self.reward_model_stage()
        for iteration in self.preference_iterations[:1]:
            if iteration:
                yield self.self_play_stage(iteration)
            yield self.preference_stage(iteration)
        if self.rl.num_rounds:
            yield self.rl_round_stage(1)
        if self.trains:
            yield self.merge_stage()
        if self.soup:
            yield self.soup_stage(self.soup.num_policies)
        yield from self._measuring_stages()
        if self.trains:
            yield self.promote_stage()

    def _measuring_stages(self) -> Iterator[StageConfig]:
        if self.data:
            yield self.evaluate_stage()
        for name in self.data_suites:
            yield self.preprocess_suite_stage(name)
            yield self.evaluate_suite_stage(name)
        for name in self.harness_suites:
            yield self.harness_stage(name)
        if self.against:
            yield self.compare_stage()


def _measured(model: ModelConfig) -> ModelConfig:
    """What counts of a model that is only measured: not the context that training would need."""
    if model.init == "random":
        return model  # is refused
    names = ("path", "revision", "chat_template")
    return ModelConfig(**{name: getattr(model, name) for name in names})


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
