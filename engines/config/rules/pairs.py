"""Rules for the trainers that learn from pairs of answers."""

from engines.config.options import check_options
from engines.config.rows.preference import BRADLEY_TERRY, PREFERENCE_LOSSES
from engines.config.rules.average import check_average
from engines.config.rules.models import check_value_model
from engines.config.rules.order import check_supervised_order
from engines.config.rules.sizes import check_divides
from engines.config.sections import PreferenceConfig, RewardTrainingConfig
from engines.config.training import TrainingConfig


def check_preference(preference: PreferenceConfig, training: TrainingConfig) -> None:
    """Refuse unknown losses or options, and indivisible batches; raises `ConfigError`."""
    row = PREFERENCE_LOSSES.find(preference.loss)
    check_options(preference.options, [row], "preference.options")
    check_supervised_order("preference.order", preference.order)
    check_divides("preference.batch_size_pairs", preference.batch_size_pairs, training)
    check_average("preference.optimizer", preference.optimizer, training)


def check_reward_training(reward: RewardTrainingConfig, training: TrainingConfig) -> None:
    """Refuse backends without value models, bad options and batches; raises `ConfigError`."""
    check_value_model("reward_model", training)
    check_options(reward.options, [BRADLEY_TERRY], "reward_model.options")
    check_supervised_order("reward_model.order", reward.order)
    check_divides("reward_model.batch_size_pairs", reward.batch_size_pairs, training)
    check_average("reward_model.optimizer", reward.optimizer, training)
