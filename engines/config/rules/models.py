"""Rules for the models beside the policy: critics, reward models, judges."""

from collections.abc import Mapping

from engines.config.algorithm import RewardConfig
from engines.config.backends import BACKENDS
from engines.config.options import check_options
from engines.config.plugins import REWARDS, ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.rules.answers import check_structured_output
from engines.config.sections import RLConfig
from engines.config.training import TrainingConfig
from infra.errors import ConfigError


def check_value_models(rl: RLConfig, training: TrainingConfig) -> None:
    """Refuse a critic or reward model that the backend cannot hold; raises `ConfigError`."""
    asked = {"rl.critic": rl.critic, "rl.reward.model": rl.reward.model}
    for setting, model in asked.items():
        if model is not None:
            check_value_model(setting, training)


def check_value_model(setting: str, training: TrainingConfig) -> None:
    """Refuse a value model that the backend cannot hold; raises `ConfigError` at `setting`."""
    backend = BACKENDS.get(training.backend)
    if backend is not None and backend.value_model is None:
        able = [name for name, other in BACKENDS.items() if other.value_model is not None]
        raise ConfigError(
            setting,
            f"got one with training.backend {training.backend}, which has no value model; "
            f"need one of {', '.join(able)}; set training.backend to it",
        )


_SAID_BY: Mapping[str, str] = {
    "model": "the role reward says; need rl.reward.model, which this recipe lacks; set "
    "rl.reward.model.path to a sequence classification model",
    "judge": "a judge writes; need rl.reward.judge, which this recipe lacks; set "
    "rl.reward.judge.path and rl.reward.judge.prompt",
}


def check_reward_models(reward: RewardConfig) -> None:
    """Refuse missing or unread models, and `accuracy` without verdict; raises `ConfigError`."""
    parts = {path: part for path, part in reward.parts.items() if part.file is None}
    rows = {path: REWARDS.find(part.function, f"{path}.function") for path, part in parts.items()}
    for path, row in rows.items():
        if row.reads is not None and row.reads not in reward.models:
            raise ConfigError(
                f"{path}.function",
                f"got {row.name}, which reads what {_SAID_BY[row.reads]}",
            )
    for path, row in rows.items():
        if not row.is_verdict and path.rpartition(".")[2] in reward.accuracy:
            right = ", ".join(each.name for each in REWARDS.rows if each.is_verdict)
            raise ConfigError(
                "rl.reward.accuracy",
                f"got {path.rpartition('.')[2]}, whose function {row.name} does not say whether an "
                f"answer is right; need a component with one of {right}, or a file; name it",
            )
    # A function in a file may read a model; it is not run to find out.
    if len(parts) < len(reward.parts):
        return
    for name in sorted(reward.models.keys() - {row.reads for row in rows.values()}):
        able = " or ".join(row.name for row in REWARDS.rows if row.reads == name)
        raise ConfigError(
            f"rl.reward.{name}",
            "got a model, and nothing reads what it says; need null, or a function or component "
            f"{able}; remove it, or add one",
        )


def check_judge(reward: RewardConfig, rollout: RolloutConfig) -> None:
    """Refuse a judge that the rollout engine cannot serve; raises `ConfigError`."""
    if reward.judge is None:
        return
    section, form = "rl.reward.judge", reward.judge.sampling.structured_output
    check_structured_output(f"{section}.sampling.structured_output", form, rollout)
    engine = ROLLOUT_ENGINES.find(rollout.engine)
    check_options(reward.judge.options, [engine], f"{section}.options")
