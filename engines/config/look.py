"""What travels between a plan and `engines.jobs.preflight`, the look at what its recipe names."""

from engines.config.algorithm import RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.distillation import DistillationConfig
from engines.config.model import JudgeConfig, ModelConfig, RewardModelConfig
from engines.config.sections import SelfPlayConfig
from engines.config.suite import SuiteConfig
from engines.config.training import TrainingConfig


class Look(StrictModel):
    """What is to be looked at."""

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
    """Judges the answers to the rows of `scored`, whoever wrote it; null asks nothing of them."""
    scored: tuple[str, ...] = ("evaluation",)
    """Splits whose rows are asked about."""
    reward_model: RewardModelConfig | None = None
    reward_training: TrainingConfig | None = None
    """Of the ranks that hold it; null asks nothing of them."""
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
    """Of one checkpoint of the model, which the look finds; null where no directory tells it."""
    answer_lengths: dict[str, int] = {}
    """Setting to the longest answer that it allows, of what is only measured."""
    stop_token_ids: dict[str, tuple[int, ...]] = {}
    """Setting to the stop tokens that it names."""


class Answer(StrictModel):
    """The first problem; or, where there is none, what was looked at."""

    path: str | None = None
    problem: str | None = None
    look: Look | None = None
    """With the commit of everything on the hub."""
