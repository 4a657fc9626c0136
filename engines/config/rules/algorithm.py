"""Rules between the parts of an RL algorithm and for its teacher.

They refuse missing inputs, ignored settings and losses without a useful gradient.
"""

from collections.abc import Mapping

from engines.config.algorithm import TOPK, AlgorithmConfig, DistillationConfig
from engines.config.options import check_options, check_parts
from engines.config.plugins import REWARDS, ROLLOUT_ENGINES, engines_with
from engines.config.rollout import RolloutConfig
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.config.rules.models import GDPO, resolved_algorithm
from engines.config.sections import RLConfig
from infra.errors import ConfigError, refuse


def check_sampling(rl: RLConfig) -> None:
    """Refuse sampling and schedules that would fail or mislead; raises `ConfigError`."""
    refuse(
        rl.sampling.temperature == 0,
        "rl.sampling.temperature",
        "got 0; need > 0: greedy samples of a prompt are all equal",
    )
    for path, optimizer in rl.optimizers.items():
        refuse(
            optimizer.schedule != "constant",
            f"{path}.schedule",
            f"got {optimizer.schedule!r}; need 'constant', because rounds may be added later",
        )
    # The sampler renormalises over the kept tokens, the trainer over the whole vocabulary: equal
    # distributions differ by the logarithm of the kept mass.
    for name, got, need, cut in (
        ("top_p", rl.sampling.top_p, 1.0, rl.sampling.top_p < 1),
        ("top_k", rl.sampling.top_k, 0, rl.sampling.top_k > 0),
        ("structured_output", "a form", "null", rl.sampling.structured_output is not None),
    ):
        refuse(
            cut and rl.mismatch.enable,
            f"rl.sampling.{name}",
            f"got {got}; need {need}: rl.mismatch compares logprobs over the whole vocabulary, "
            f"but the sampler normalizes over the tokens that {name} keeps; set it to {need}, "
            "or rl.mismatch.enable to false",
        )


def check_algorithm(rl: RLConfig) -> None:
    """Refuse missing parts, and options and sizes they cannot use; raises `ConfigError`."""
    estimator = check_parts(rl.algorithm)
    _check_needs(rl)
    refuse(
        estimator.group_relative and rl.group_size < 2 and rl.learns_from_rewards,
        "rl.group_size",
        f"got {rl.group_size}; {estimator.name} needs >= 2 (the advantage would be 0 for every "
        "sample)",
    )
    overlong, limit = rl.algorithm.overlong, rl.sampling.max_new_tokens
    refuse(
        overlong.enable and overlong.buffer_length > limit,
        "rl.algorithm.overlong.buffer_length",
        f"got {overlong.buffer_length}; need at most rl.sampling.max_new_tokens {limit}; lower it",
    )


_NEED_NO_ROLE = frozenset(
    {
        "advantages",
        "loss_mask",
        "rollout_logprobs",
        "old_logprobs",
        "sum_pi_squared",
        "uniform",
        "greedy_scores",
    }
)


_MADE_BY_CRITIC = frozenset({"values", "last_values"})


_MADE_BY: Mapping[str, str] = {
    **dict.fromkeys(_MADE_BY_CRITIC, "the role critic (rl.critic)"),
    "ref_logprobs": "the role reference",
}


def check_critic(rl: RLConfig) -> None:
    """Refuse a critic that nothing reads or that starts from no model; raises `ConfigError`."""
    if rl.critic is None:
        return
    estimator = ADVANTAGES.find(rl.algorithm.adv_estimator)
    if not _MADE_BY_CRITIC & {*estimator.columns, *estimator.rows}:
        readers = [row.name for row in ADVANTAGES.rows if _MADE_BY_CRITIC & {*row.columns}]
        raise ConfigError(
            "rl.critic",
            f"got a critic with adv_estimator {estimator.name}, which reads no values; need null; "
            f"remove it, or set rl.algorithm.adv_estimator to {' or '.join(readers)}",
        )
    refuse(
        rl.critic.start == "reward_model" and rl.reward.model is None,
        "rl.critic.start",
        "got reward_model, and this recipe lacks the role reward (rl.reward.model); need that "
        "model; set rl.reward.model.path, or start from policy",
    )


def _check_needs(rl: RLConfig) -> None:
    algorithm = rl.algorithm
    _check_columns(rl)
    loss = POLICY_LOSSES.find(algorithm.loss_mode)
    refuse(
        loss.loss_agg_mode not in (None, algorithm.loss_agg_mode),
        "rl.algorithm.loss_agg_mode",
        f"got {algorithm.loss_agg_mode} with loss_mode {loss.name}; need "
        f"{loss.loss_agg_mode}, which is part of that loss; set it",
    )
    refuse(
        rl.refresh_reference and not algorithm.needs_reference,
        "rl.refresh_reference",
        "got true, and nothing reads a reference; need false; or set "
        "rl.algorithm.use_kl_loss or use_kl_in_reward",
    )
    if algorithm.adv_estimator == GDPO:
        _check_components(algorithm)
        resolved_algorithm(rl)
    if algorithm.positive_nll_coef > 0 and rl.reward.file is None:
        judged_by = REWARDS.find(rl.reward.function)
        refuse(
            not judged_by.is_verdict,
            "rl.algorithm.positive_nll_coef",
            f"got {algorithm.positive_nll_coef} with rl.reward.function {judged_by.name}, "
            "which does not say whether an answer is right; need 0; or a reward that does",
        )
    single = {"pf_ppo": "has no answers to choose among", "filter_groups": "is always uniform"}
    for name, problem in single.items() if rl.group_size == 1 else ():
        refuse(
            getattr(algorithm, name).enable,
            f"rl.algorithm.{name}.enable",
            f"got true with rl.group_size 1, where a group {problem}; need groups of 2 or "
            "more; raise rl.group_size, or set this to false",
        )


def _check_columns(rl: RLConfig) -> None:
    algorithm = rl.algorithm
    made = {
        *_NEED_NO_ROLE,
        *(("ref_logprobs",) if algorithm.needs_reference else ()),
        *(_MADE_BY_CRITIC if rl.critic else ()),
    }
    for table, part in (
        (ADVANTAGES, algorithm.adv_estimator),
        (POLICY_LOSSES, algorithm.loss_mode),
    ):
        row = table.find(part)
        for name in sorted({*row.columns, *row.rows} - made):
            able = ", ".join(
                each.name for each in table.rows if {*each.columns, *each.rows} <= made
            )
            raise ConfigError(
                table.setting,
                f"got {row.name}, which reads the column {name}; need "
                f"{_MADE_BY.get(name, 'something that computes it')}, which this recipe lacks; "
                f"add it, or choose one of {able}",
            )


def _check_components(algorithm: AlgorithmConfig) -> None:
    """Refuse settings that change the score but not its components, which GDPO compares."""
    for setting, is_set, instead in (
        ("use_kl_in_reward", algorithm.use_kl_in_reward, "use rl.algorithm.use_kl_loss"),
        ("overlong.enable", algorithm.overlong.enable, "add a component length to rl.reward"),
    ):
        refuse(
            is_set,
            f"rl.algorithm.{setting}",
            "got true with adv_estimator gdpo, which compares components of the score and "
            f"would not see it; need false; {instead}",
        )


_SECTION = "rl.distillation"
PROMPT_LOGPROBS, ANY_TEMPERATURE = "prompt_logprobs", "prompt_logprobs_at_any_temperature"
"""Capabilities of a rollout engine."""


def check_distillation(rl: RLConfig) -> None:
    """Refuse a loss without a useful gradient, and ignored settings; raises `ConfigError`."""
    section = rl.distillation
    if section is None:
        return
    if section.loss != TOPK:
        _check_estimator(rl, section)
    if rl.learns_from_rewards:
        return
    algorithm = rl.algorithm
    estimator = ADVANTAGES.find(algorithm.adv_estimator)
    refuse(
        estimator.selects,
        ADVANTAGES.setting,
        f"got {estimator.name}, which selects samples by reward, with {_SECTION}.policy_weight "
        f"0, where nothing learns from rewards; set another, or raise {_SECTION}.policy_weight",
    )
    for setting, is_set in {
        "rl.algorithm.use_kl_loss": algorithm.use_kl_loss,
        "rl.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "rl.algorithm.entropy_coeff": algorithm.entropy_coeff != 0,
        "rl.algorithm.positive_nll_coef": algorithm.positive_nll_coef != 0,
        "rl.algorithm.pf_ppo.enable": algorithm.pf_ppo.enable,
        "rl.algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "rl.critic": rl.critic is not None,
    }.items():
        refuse(
            is_set,
            setting,
            f"is set with {_SECTION}.policy_weight 0, where nothing learns from rewards; "
            f"remove it, or raise {_SECTION}.policy_weight",
        )


def _check_estimator(rl: RLConfig, section: DistillationConfig) -> None:
    setting, loss, plain = f"{_SECTION}.loss", section.loss, section.loss.removesuffix("+")
    # The error for an unknown name lists `topk` and the estimators.
    refuse(
        plain not in KL_ESTIMATORS.names(),
        setting,
        f"got {loss}; need {TOPK} or one of {', '.join(KL_ESTIMATORS.names())}; set one",
    )
    refuse(
        loss == plain and KL_ESTIMATORS.find(plain).target == KL_ESTIMATORS.find("k1").target,
        setting,
        f"got {loss}, whose gradient is 0 on average; need one with a gradient; set {loss}+, "
        f"which has that of k2, or {TOPK}",
    )
    refuse(
        rl.batch_size_prompts > rl.prompts_per_update or rl.num_epochs > 1,
        setting,
        f"got {loss} with several updates per batch; after the first one the samples come from "
        f"an older policy, where it is no estimate of the KL; use {TOPK}, or rl.num_epochs 1 "
        "and rl.mini_batch_size_prompts null",
    )
    for name in ("num_top", "tail"):
        given, default = getattr(section, name), type(section).model_fields[name].default
        refuse(
            given != default,
            f"{_SECTION}.{name}",
            f"got {given} with {_SECTION}.loss {section.loss}, which uses only the sampled "
            f"token and ignores {name}; remove it, or set the loss to {TOPK}",
        )


def check_served_teacher(rl: RLConfig, rollout: RolloutConfig, max_length: int) -> None:
    """Refuse served teachers that cannot return the logprobs asked for; raises `ConfigError`."""
    if rl.distillation is None or rl.distillation.served is None:
        return
    setting, options = f"{_SECTION}.served", rl.distillation.served.options
    row, temperature = ROLLOUT_ENGINES.place(rollout.engine), rl.sampling.temperature
    refuse(
        PROMPT_LOGPROBS not in row.capabilities,
        setting,
        f"got rollout.engine {row.name}, which cannot return logprobs of given tokens; need "
        f"{' or '.join(engines_with(PROMPT_LOGPROBS))}; set rollout.engine to one, or this to "
        "null",
    )
    refuse(
        temperature != 1 and ANY_TEMPERATURE not in row.capabilities,
        setting,
        f"got rollout.engine {row.name}, which returns logprobs of given tokens only at "
        f"temperature 1, with rl.sampling.temperature {temperature}; need "
        f"{' or '.join(engines_with(ANY_TEMPERATURE))}; set rollout.engine to it, "
        "rl.sampling.temperature to 1, or this to null",
    )
    check_options(options, [row], f"{setting}.options")
    needed, given = max_length + row.num_spare_tokens, options.get("max_model_len")
    refuse(
        given is not None and given < needed,
        f"{setting}.options.max_model_len",
        f"got {given}; need {needed}, for answers that fill model.max_length {max_length}; "
        "raise it",
    )


def num_spare_tokens(section: DistillationConfig, rollout_engine: str | None) -> int:
    """Return the tokens of its context that a served teacher leaves free; 0 if not served."""
    if section.served is None or rollout_engine is None:
        return 0
    return ROLLOUT_ENGINES.place(rollout_engine).num_spare_tokens
