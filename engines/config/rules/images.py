"""Rules for rows with images: which models would read their prompts as text alone.

`shown` names the source of images, as the beginning of a sentence. Every rule raises `ConfigError`.
"""

from engines.config.distillation import DistillationConfig
from engines.config.model import JudgeConfig, RewardModelConfig
from infra.errors import ConfigError


def check_seen_by_judges(
    shown: str, reward_model: RewardModelConfig | None, judge: JudgeConfig | None
) -> None:
    """Refuse a reward model or judge, because it does not see the images."""
    if reward_model is None and judge is None:
        return
    raise ConfigError(
        f"rl.reward.{'judge' if reward_model is None else 'model'}",
        f"got a model that judges; {shown}, which it is not shown; need a rule; set "
        "rl.reward.function to one, or leave out the source",
    )


def check_not_self_played(shown: str) -> None:
    """Refuse self-play over rows with images, because pairs hold only text."""
    raise ConfigError(
        "preference.self_play.source",
        f"got best_worst, which asks about rows of data.rl; {shown}, which pairs do not hold; need "
        "rows of text; set it to spin, or leave out the source",
    )


def check_seen_by_teacher(shown: str, teacher: DistillationConfig | None) -> None:
    """Refuse a served teacher, because its engines get only tokens."""
    if teacher is None or teacher.served is None:
        return
    raise ConfigError(
        "rl.distillation.served",
        f"{shown}, which served teachers cannot see; need a teacher on the training ranks; set "
        "this to null, or leave out the source",
    )
