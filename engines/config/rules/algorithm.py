"""Rules between the parts of an RL algorithm: missing inputs and ignored settings."""

from collections.abc import Mapping

from engines.config.algorithm import AlgorithmConfig
from engines.config.options import check_parts
from engines.config.plugins import REWARDS
from engines.config.rows import ADVANTAGES, POLICY_LOSSES
from engines.config.rules.models import GDPO, resolved_algorithm
from engines.config.sections import RLConfig
from infra.errors import ConfigError


def check_sampling(rl: RLConfig) -> None:
    """Refuse sampling and schedules that would fail or mislead; raises `ConfigError`."""
    sampling = rl.sampling
    if sampling.temperature == 0:
        raise ConfigError(
            "rl.sampling.temperature", "got 0; need > 0: greedy samples of a prompt are all equal"
        )
    for path, optimizer in rl.optimizers.items():
        if optimizer.schedule != "constant":
            raise ConfigError(
                f"{path}.schedule",
                f"got {optimizer.schedule!r}; need 'constant', for the number of rounds is open",
            )
    _check_whole_distribution(rl)


def _check_whole_distribution(rl: RLConfig) -> None:
    """Refuse a cut distribution whose logprobs are compared with the trainer's.

    The sampler renormalises over the kept tokens, the trainer over the whole vocabulary: equal
    beliefs differ by the logarithm of the kept mass.
    """
    sampling = rl.sampling
    structured = sampling.structured_output
    cuts = (
        ("top_p", sampling.top_p, 1.0, sampling.top_p < 1),
        ("top_k", sampling.top_k, 0, sampling.top_k > 0),
        ("structured_output", "a form", "null", structured is not None),
    )
    for name, got, need, cut in cuts:
        if cut and rl.mismatch.enable:
            raise ConfigError(
                f"rl.sampling.{name}",
                f"got {got}; need {need}: rl.mismatch compares logprobs of the whole vocabulary, "
                f"and the sampler's are of what {name} keeps; set it to {need}, or "
                "rl.mismatch.enable to false",
            )


def check_algorithm(rl: RLConfig) -> None:
    """Refuse missing parts, and options and sizes they cannot use; raises `ConfigError`."""
    estimator = check_parts(rl.algorithm)
    _check_needs(rl)
    if estimator.group_relative and rl.group_size < 2 and rl.learns_from_rewards:
        raise ConfigError(
            "rl.group_size",
            f"got {rl.group_size}; {estimator.name} needs >= 2 (the advantage would be 0 for every "
            "sample)",
        )
    overlong, limit = rl.algorithm.overlong, rl.sampling.max_new_tokens
    if overlong.enable and overlong.buffer_length > limit:
        raise ConfigError(
            "rl.algorithm.overlong.buffer_length",
            f"got {overlong.buffer_length}; need at most rl.sampling.max_new_tokens {limit}; "
            "lower it",
        )


_MADE_ALWAYS = frozenset(
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
    """Refuse a critic that nothing reads or whose start is missing; raises `ConfigError`."""
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
    if rl.critic.start == "reward_model" and rl.reward.model is None:
        raise ConfigError(
            "rl.critic.start",
            "got reward_model, and this recipe lacks the role reward (rl.reward.model); need that "
            "model; set rl.reward.model.path, or start from policy",
        )


def _check_needs(rl: RLConfig) -> None:
    algorithm = rl.algorithm
    _check_columns(rl)
    loss = POLICY_LOSSES.find(algorithm.loss_mode)
    if loss.loss_agg_mode not in (None, algorithm.loss_agg_mode):
        raise ConfigError(
            "rl.algorithm.loss_agg_mode",
            f"got {algorithm.loss_agg_mode} with loss_mode {loss.name}; need "
            f"{loss.loss_agg_mode}, which is part of that loss; set it",
        )
    if rl.refresh_reference and not algorithm.needs_reference:
        raise ConfigError(
            "rl.refresh_reference",
            "got true, and nothing reads a reference; need false; or set "
            "rl.algorithm.use_kl_loss or use_kl_in_reward",
        )
    if algorithm.adv_estimator == GDPO:
        _check_components(algorithm)
        resolved_algorithm(rl)
    if algorithm.positive_nll_coef > 0 and rl.reward.file is None:
        judged_by = REWARDS.find(rl.reward.function)
        if not judged_by.is_verdict:
            raise ConfigError(
                "rl.algorithm.positive_nll_coef",
                f"got {algorithm.positive_nll_coef} with rl.reward.function {judged_by.name}, "
                "which does not say whether an answer is right; need 0; or a reward that does",
            )
    if rl.group_size == 1:
        _check_single_answers(algorithm)


def _check_columns(rl: RLConfig) -> None:
    algorithm = rl.algorithm
    made = _MADE_ALWAYS | ({"ref_logprobs"} if algorithm.needs_reference else set())
    made |= _MADE_BY_CRITIC if rl.critic else set()
    named = ((ADVANTAGES, algorithm.adv_estimator), (POLICY_LOSSES, algorithm.loss_mode))
    for table, part in named:
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
    """Refuse settings that change the score but not its components, which are compared."""
    if algorithm.use_kl_in_reward:
        raise ConfigError(
            "rl.algorithm.use_kl_in_reward",
            "got true with adv_estimator gdpo, which compares components of the score and would "
            "not see it; need false; use rl.algorithm.use_kl_loss",
        )
    if algorithm.overlong.enable:
        raise ConfigError(
            "rl.algorithm.overlong.enable",
            "got true with adv_estimator gdpo, which compares components of the score and would "
            "not see it; need false; add a component length to rl.reward",
        )


def _check_single_answers(algorithm: AlgorithmConfig) -> None:
    if algorithm.pf_ppo.enable:
        raise ConfigError(
            "rl.algorithm.pf_ppo.enable",
            "got true with rl.group_size 1, where a prompt has no answers to choose among; need "
            "groups of 2 or more; raise rl.group_size, or set it to false",
        )
    if algorithm.filter_groups.enable:
        raise ConfigError(
            "rl.algorithm.filter_groups.enable",
            "got true with rl.group_size 1, where every group is uniform and none would be left; "
            "need groups of 2 or more; raise rl.group_size, or set it to false",
        )
