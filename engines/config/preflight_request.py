"""Request to `engines.jobs.preflight.run`, and its answer."""

from engines.config.algorithm import DistillationConfig, RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.model import JudgeConfig, ModelConfig, RewardModelConfig
from engines.config.sections import SelfPlayConfig
from engines.config.suite import SuiteConfig
from engines.config.training import TrainingConfig


class PreflightRequest(StrictModel):
    """The parts of a recipe that the preflight process checks."""

    model: ModelConfig
    trains: bool = True
    """True if the model is trained; a measured one keeps its own context, not `max_length`."""
    against: ModelConfig | None = None
    """Model to compare with; only measured."""
    data: DataConfig | None
    suites: dict[str, SuiteConfig] = {}
    training: TrainingConfig | None = None
    """Training section that must be able to train the model; null skips this check."""
    averages: bool = False
    """True if a stage keeps a moving average of the weights."""
    reward: RewardConfig | None = None
    """null for a built-in reward, which needs no check."""
    scoring: RewardConfig | None = None
    """Reward that scores the rows of `scored`; null checks no rows."""
    scored: tuple[str, ...] = ("evaluation",)
    """Splits whose rows are checked."""
    reward_model: RewardModelConfig | None = None
    reward_training: TrainingConfig | None = None
    """Training section of the ranks that hold the reward model; null checks no layout."""
    judge: JudgeConfig | None = None
    teacher: DistillationConfig | None = None
    rollout_engine: str | None = None
    """Engine that must be able to serve the model; null skips this check."""
    self_play: SelfPlayConfig | None = None
    has_critic: bool = False
    """True if a value model is trained beside the policy."""
    trains_values: bool = False
    """True if a critic or reward model starts from the model."""
    checkpoint_bytes: int | None = None
    """Size of one checkpoint, found by the preflight; null without a directory."""
    answer_lengths: dict[str, int] = {}
    """Setting -> longest answer in tokens that it allows, for measured models."""
    stop_token_ids: dict[str, tuple[int, ...]] = {}
    """Setting -> stop tokens that it names."""


class PreflightAnswer(StrictModel):
    """The first problem; or, without a problem, the request."""

    path: str | None = None
    problem: str | None = None
    found: PreflightRequest | None = None
    """The request, with the commit of everything on the hub; None if there is a problem."""
