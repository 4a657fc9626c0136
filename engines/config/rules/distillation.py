"""Rules for a teacher in the RL rounds."""

from engines.config.algorithm import TOPK, DistillationConfig
from engines.config.options import check_options
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS
from engines.config.sections import RLConfig
from infra.errors import ConfigError

_SECTION = "rl.distillation"
PROMPT_LOGPROBS, ANY_TEMPERATURE = "prompt_logprobs", "prompt_logprobs_at_any_temperature"
"""Capabilities of a rollout engine."""


def check_distillation(rl: RLConfig) -> None:
    """Refuse a loss without a useful gradient, and ignored settings; raises `ConfigError`."""
    section = rl.distillation
    if section is None:
        return
    if section.loss != TOPK:
        _check_estimator(rl, section.loss)
        _check_unread(section)
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
    # The error for an unknown name lists `topk` and the estimators.
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


def _check_unread(section: DistillationConfig) -> None:
    for name in ("num_top", "tail"):
        given, default = getattr(section, name), type(section).model_fields[name].default
        if given != default:
            raise ConfigError(
                f"{_SECTION}.{name}",
                f"got {given} with {_SECTION}.loss {section.loss}, which sees the sampled token "
                f"alone and reads nothing of it; remove it, or set the loss to {TOPK}",
            )


def check_served_teacher(rl: RLConfig, rollout: RolloutConfig, max_length: int) -> None:
    """Refuse served teachers that cannot return the logprobs asked for; raises `ConfigError`."""
    if rl.distillation is None or rl.distillation.served is None:
        return
    setting, options = f"{_SECTION}.served", rl.distillation.served.options
    row, temperature = ROLLOUT_ENGINES.place(rollout.engine), rl.sampling.temperature
    if PROMPT_LOGPROBS not in row.capabilities:
        raise ConfigError(
            setting,
            f"got engines of rollout.engine {row.name}, which says no logprobs of given tokens; "
            f"need {_able(PROMPT_LOGPROBS)}; set rollout.engine to one, or this to null",
        )
    if temperature != 1 and ANY_TEMPERATURE not in row.capabilities:
        raise ConfigError(
            setting,
            f"got engines of rollout.engine {row.name}, which says logprobs of given tokens at "
            f"temperature 1 alone, and rl.sampling.temperature {temperature}; need "
            f"{_able(ANY_TEMPERATURE)}; set rollout.engine to it, rl.sampling.temperature to 1, or "
            "this to null",
        )
    check_options(options, [row], f"{setting}.options")
    needed, given = max_length + row.num_spare_tokens, options.get("max_model_len")
    if given is not None and given < needed:
        raise ConfigError(
            f"{setting}.options.max_model_len",
            f"got {given}; need {needed}, for answers that fill model.max_length {max_length}; "
            "raise it",
        )


def num_spare_tokens(section: DistillationConfig, rollout_engine: str | None) -> int:
    """Return the tokens of its context that a served teacher leaves free; 0 if not served."""
    if section.served is None or rollout_engine is None:
        return 0
    return ROLLOUT_ENGINES.place(rollout_engine).num_spare_tokens


def _able(capability: str) -> str:
    rows = (*ROLLOUT_ENGINES.rows, *ROLLOUT_ENGINES.outside())
    return " or ".join(sorted({row.name for row in rows if capability in row.capabilities}))
