"""Request to `engines.jobs.preflight.run`, and its answer."""

from engines.config.algorithm import RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.distillation import DistillationConfig
from engines.config.model import JudgeConfig, ModelConfig, RewardModelConfig
from engines.config.sections import SelfPlayConfig
from engines.config.suite import SuiteConfig
from engines.config.training import TrainingConfig


class PreflightRequest(StrictModel):
    """Parts of a recipe that the child process checks."""

    model: ModelConfig
    trains: bool = True
    """Whether the model is trained; one that is only measured has the context that it was built
    with, whatever `max_length` says."""
    against: ModelConfig | None = None
    """Only measured, too."""
    data: DataConfig | None
    suites: dict[str, SuiteConfig] = {}
    training: TrainingConfig | None = None
    """Has to train the model; null asks nothing of it."""
    averages: bool = False
    """Some stage keeps a moving average of the weights that it trains."""
    reward: RewardConfig | None = None
    """null for one of this project's own, which has tests."""
    scoring: RewardConfig | None = None
    """Reward that scores the rows of `scored`; null checks no rows."""
    scored: tuple[str, ...] = ("evaluation",)
    """Splits whose rows are asked about."""
    reward_model: RewardModelConfig | None = None
    reward_training: TrainingConfig | None = None
    """Training section of the ranks that hold the reward model; null checks no layout."""
    judge: JudgeConfig | None = None
    teacher: DistillationConfig | None = None
    rollout_engine: str | None = None
    """Has to serve the model; null asks none."""
    self_play: SelfPlayConfig | None = None
    has_critic: bool = False
    """A model of values is trained beside it."""
    trains_values: bool = False
    """One starts from it: a critic, or a reward model."""
    checkpoint_bytes: int | None = None
    """Size of one checkpoint of the model; found by the preflight, null without a directory."""
    answer_lengths: dict[str, int] = {}
    """Setting to the longest answer that it allows, of what is only measured."""
    stop_token_ids: dict[str, tuple[int, ...]] = {}
    """Setting to the stop tokens that it names."""


class PreflightAnswer(StrictModel):
    """The first problem; or the request, if there is none."""

    path: str | None = None
    problem: str | None = None
    found: PreflightRequest | None = None
    """The request, with the commit of everything on the hub; None if there is a problem."""
