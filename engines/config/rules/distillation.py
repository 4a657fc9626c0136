"""Rules of a teacher in the rounds of RL."""

from engines.config.distillation import TOPK
from engines.config.rows.algorithm import ADVANTAGES, KL_ESTIMATORS
from engines.config.sections import RLConfig
from infra.errors import ConfigError

_SECTION = "rl.distillation"


def check_distillation(rl: RLConfig) -> None:
    """Refuse a loss that teaches nothing or the wrong thing, and settings that would be ignored.

    Args:
        rl: of a recipe or a round.

    Raises:
        ConfigError: names the field.
    """
    section = rl.distillation
    if section is None:
        return
    if section.loss != TOPK:
        _check_estimator(rl, section.loss)
    if rl.learns_from_rewards:
        return
    algorithm = rl.algorithm
    estimator = ADVANTAGES.find(algorithm.adv_estimator)
    if estimator.selects:
        raise ConfigError(
            ADVANTAGES.setting,
            f"got {estimator.name}, which chooses by rewards what is trained on, with "
            f"{_SECTION}.policy_weight 0, where nothing learns from them; need another; set it, or "
            f"raise {_SECTION}.policy_weight",
        )
    ignored = {
        "rl.algorithm.use_kl_loss": algorithm.use_kl_loss,
        "rl.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "rl.algorithm.entropy_coeff": algorithm.entropy_coeff != 0,
        "rl.algorithm.positive_nll_coef": algorithm.positive_nll_coef != 0,
        "rl.algorithm.pf_ppo.enable": algorithm.pf_ppo.enable,
        "rl.algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "rl.critic": rl.critic is not None,
    }
    for setting, is_set in ignored.items():
        if is_set:
            raise ConfigError(
                setting,
                f"got one with {_SECTION}.policy_weight 0, where nothing learns from rewards; need "
                f"none; remove it, or raise {_SECTION}.policy_weight",
            )


def _check_estimator(rl: RLConfig, loss: str) -> None:
    setting, plain = f"{_SECTION}.loss", loss.removesuffix("+")
    # An unknown name is told with both kinds of what there is.
    if plain not in KL_ESTIMATORS.names():
        raise ConfigError(
            setting,
            f"got {loss}; need {TOPK} or one of {', '.join(KL_ESTIMATORS.names())}; set one",
        )
    if loss == plain and KL_ESTIMATORS.find(plain).target == KL_ESTIMATORS.find("k1").target:
        raise ConfigError(
            setting,
            f"got {loss}, whose gradient is 0 on average; need one with a gradient; set {loss}+, "
            f"which has that of k2, or {TOPK}",
        )
    if rl.several_updates:
        raise ConfigError(
            setting,
            f"got {loss} with several updates of a batch, where samples are an older policy's and "
            f"it estimates no KL; need {TOPK}, or one update; set it, or rl.num_epochs to 1 and "
            "rl.mini_batch_size_prompts to null",
        )
