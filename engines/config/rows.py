"""Advantage estimators, policy losses, KL estimators and preference losses by name.

Imports none of them.
"""

from dataclasses import dataclass

from infra.plugins import PluginTable, Row


@dataclass(frozen=True, kw_only=True)
class AlgorithmRow(Row):
    """An advantage estimator, a policy loss or a KL estimator.

    Attributes:
        paper: source of the formula (arXiv id and section, or a title).
        columns: columns that the `TokenBatch` must have, besides `loss_mask`.
        rows: per-sequence values that the `TokenBatch` must have.
        group_relative: compares samples of one prompt, so it needs at least two.
        loss_agg_mode: the only aggregation that a policy loss allows; None: any.
        properties: invariances that contract tests check. `shift`: a constant added to all scores
            changes nothing; `linear`: also, a factor scales the result; `scale`: a factor changes
            nothing; `silent_groups`: equal scores in a group give exactly 0; `silent_steps`: only
            if all groups do.
        selects: an estimator that chooses the samples to train on (`Advantages.kept_B`).
        prepass: ``module:function`` of a policy loss that sees the whole step before it is split;
            see `engines.algorithms.parts.PrepassInputs`.
    """

    paper: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    group_relative: bool = False
    loss_agg_mode: str | None = None
    properties: tuple[str, ...] = ()
    selects: bool = False
    prepass: str | None = None


_ESTIMATORS = "engines.algorithms.advantages"
_LOSSES = "engines.algorithms.losses"
_OPTIONS = "engines.algorithms.options"

ADVANTAGES = PluginTable(
    "adv_estimator",
    "rl.algorithm.adv_estimator",
    [
        AlgorithmRow(
            name="gae",
            target=f"{_ESTIMATORS}.returns:gae_advantages",
            options=f"{_OPTIONS}:GaeOptions",
            paper="arXiv:1506.02438 eq. 16; decoupled and length-adaptive: VAPO, arXiv:2504.05118 "
            "sec. 4.1",
            columns=("values",),
            rows=("last_values",),
        ),
        AlgorithmRow(
            name="grpo",
            target=f"{_ESTIMATORS}.group_relative:grpo_advantages",
            paper="arXiv:2402.03300 sec. 4.1.2; without the std: Dr. GRPO, arXiv:2503.20783 "
            "sec. 3.2",
            group_relative=True,
            properties=("shift", "silent_groups"),
        ),
        AlgorithmRow(
            name="grpo_passk",
            target=f"{_ESTIMATORS}.group_relative:grpo_passk_advantages",
            paper="arXiv:2503.19595",
            group_relative=True,
            properties=("shift", "silent_groups"),
        ),
        AlgorithmRow(
            name="rloo",
            target=f"{_ESTIMATORS}.group_relative:rloo_advantages",
            paper="arXiv:2402.14740 sec. 3.3",
            group_relative=True,
            properties=("shift", "linear", "silent_groups"),
        ),
        AlgorithmRow(
            name="opo",
            target=f"{_ESTIMATORS}.group_relative:opo_advantages",
            paper="arXiv:2505.23585 sec. 3",
            group_relative=True,
            properties=("shift", "linear", "silent_groups"),
        ),
        AlgorithmRow(
            name="gpg",
            target=f"{_ESTIMATORS}.group_relative:gpg_advantages",
            options=f"{_OPTIONS}:GpgOptions",
            paper="arXiv:2504.02546 sec. 3",
            group_relative=True,
            properties=("shift", "linear", "silent_groups"),
        ),
        AlgorithmRow(
            name="gdpo",
            target=f"{_ESTIMATORS}.group_relative:gdpo_advantages",
            options=f"{_OPTIONS}:GdpoOptions",
            paper="arXiv:2601.05242",
            group_relative=True,
            properties=("shift", "silent_steps"),
        ),
        AlgorithmRow(
            name="reinforce_plus_plus",
            target=f"{_ESTIMATORS}.returns:reinforce_plus_plus_advantages",
            options=f"{_OPTIONS}:DiscountOptions",
            paper="arXiv:2501.03262 sec. 3",
            properties=("shift", "scale", "silent_steps"),
        ),
        AlgorithmRow(
            name="reinforce_plus_plus_baseline",
            target=f"{_ESTIMATORS}.group_relative:reinforce_plus_plus_baseline_advantages",
            paper="arXiv:2501.03262 sec. 3",
            group_relative=True,
            properties=("shift", "scale", "silent_steps"),
        ),
        AlgorithmRow(
            name="remax",
            target=f"{_ESTIMATORS}.returns:remax_advantages",
            options=f"{_OPTIONS}:DiscountOptions",
            paper="arXiv:2310.10505 sec. 4",
            rows=("greedy_scores",),
        ),
        AlgorithmRow(
            name="raft",
            target=f"{_ESTIMATORS}.group_relative:raft_advantages",
            options=f"{_OPTIONS}:RaftOptions",
            paper="RAFT, arXiv:2304.06767 alg. 1; several right answers: RFT, arXiv:2308.01825 "
            "sec. 3.3",
            columns=("uniform",),
            group_relative=True,
            properties=("shift", "scale"),
            selects=True,
        ),
        AlgorithmRow(
            name="optimal_token_baseline",
            target=f"{_ESTIMATORS}.returns:optimal_token_baseline_advantages",
            paper="arXiv:2602.07078",
            columns=("old_logprobs", "sum_pi_squared"),
            group_relative=True,
            properties=("shift", "linear", "silent_groups"),
        ),
        AlgorithmRow(
            name="tir_optimal_token_baseline",
            target=f"{_ESTIMATORS}.returns:turn_baseline_advantages",
            paper="arXiv:2602.07078, by turns",
            columns=("old_logprobs", "sum_pi_squared"),
            group_relative=True,
            properties=("shift", "linear", "silent_groups"),
        ),
    ],
    AlgorithmRow,
)

_OF_ANSWERS = "seq-mean-token-mean"
POLICY_LOSSES = PluginTable(
    "loss_mode",
    "rl.algorithm.loss_mode",
    [
        AlgorithmRow(
            name="vanilla",
            target=f"{_LOSSES}:ppo_clip_loss",
            paper="arXiv:1707.06347 eq. 7; dual clip 1912.09729 eq. 5; clip-higher 2503.14476 "
            "eq. 8",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="gspo",
            target=f"{_LOSSES}:gspo_loss",
            paper="arXiv:2507.18071 eq. 5, 11",
            columns=("advantages",),
            loss_agg_mode=_OF_ANSWERS,
        ),
        AlgorithmRow(
            name="geo_mean",
            target=f"{_LOSSES}:geo_mean_loss",
            paper="GMPO, arXiv:2507.20673 eq. 4",
            columns=("advantages",),
            loss_agg_mode=_OF_ANSWERS,
        ),
        AlgorithmRow(
            name="cispo",
            target=f"{_LOSSES}:cispo_loss",
            paper="arXiv:2506.13585 eq. 4",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="sapo",
            target=f"{_LOSSES}:sapo_loss",
            options=f"{_OPTIONS}:SapoOptions",
            paper="arXiv:2511.20347",
            columns=("advantages",),
            loss_agg_mode=_OF_ANSWERS,
        ),
        AlgorithmRow(
            name="gpg",
            target=f"{_LOSSES}:reinforce_loss",
            paper="arXiv:2504.02546 eq. 6",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="reinforce",
            target=f"{_LOSSES}:reinforce_loss",
            paper="Williams, Simple statistical gradient-following algorithms, 1992",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="clip_cov",
            target=f"{_LOSSES}:clip_cov_loss",
            prepass=f"{_LOSSES}:clip_cov_prepass",
            options=f"{_OPTIONS}:ClipCovOptions",
            paper="arXiv:2505.22617 sec. 4.2",
            columns=("advantages", "old_logprobs", "uniform"),
        ),
        AlgorithmRow(
            name="kl_cov",
            target=f"{_LOSSES}:kl_cov_loss",
            prepass=f"{_LOSSES}:kl_cov_prepass",
            options=f"{_OPTIONS}:KlCovOptions",
            paper="arXiv:2505.22617 sec. 4.3",
            columns=("advantages", "old_logprobs"),
        ),
        AlgorithmRow(
            name="dppo_tv",
            target=f"{_LOSSES}:dppo_tv_loss",
            paper="arXiv:2602.04879",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="dppo_kl",
            target=f"{_LOSSES}:dppo_kl_loss",
            paper="arXiv:2602.04879",
            columns=("advantages",),
        ),
        AlgorithmRow(
            name="dro",
            target=f"{_LOSSES}:dro_loss",
            options=f"{_OPTIONS}:DroOptions",
            paper="arXiv:2405.19107",
            columns=("advantages",),
        ),
    ],
    AlgorithmRow,
)

_KL_NAMES = {
    "k1": "k1", "kl": "k1", "abs": "absolute", "k2": "k2", "mse": "k2", "k3": "k3",
    "low_var_kl": "k3",
}  # fmt: skip
KL_ESTIMATORS = PluginTable(
    "kl_loss_type",
    "rl.algorithm.kl_loss_type",
    [
        AlgorithmRow(
            name=name,
            target=f"engines.algorithms.kl:{function}",
            paper="Schulman, Approximating KL divergence, 2020",
        )
        for name, function in _KL_NAMES.items()
    ],
    AlgorithmRow,
)


@dataclass(frozen=True, kw_only=True)
class PreferenceRow(Row):
    """A preference loss.

    Attributes:
        paper: source of the formula.
        paired: it compares the two answers of a pair (`PairInputs` to `PairLoss`). Else it judges
            each answer alone against a reference point of the whole step, like
            `engines.algorithms.preference.kto.kto_loss`.
    """

    paper: str = ""
    paired: bool = True


_PAIRS = "engines.algorithms.preference.pair_objective"
_PREFERENCE_OPTIONS = "engines.algorithms.preference.options"
PREFERENCE_LOSSES = PluginTable(
    "preference_loss",
    "preference.loss",
    [
        PreferenceRow(
            name="sigmoid",
            target=f"{_PAIRS}:sigmoid_loss",
            options=f"{_PREFERENCE_OPTIONS}:SigmoidOptions",
            paper="DPO, arXiv:2305.18290 eq. 7",
        ),
        PreferenceRow(
            name="ipo",
            target=f"{_PAIRS}:ipo_loss",
            options=f"{_PREFERENCE_OPTIONS}:IpoOptions",
            paper="arXiv:2310.12036 eq. 17",
        ),
        PreferenceRow(
            name="simpo",
            target=f"{_PAIRS}:simpo_loss",
            options=f"{_PREFERENCE_OPTIONS}:SimpoOptions",
            paper="arXiv:2405.14734 eq. 6",
        ),
        PreferenceRow(
            name="orpo",
            target=f"{_PAIRS}:orpo_loss",
            options=f"{_PREFERENCE_OPTIONS}:OrpoOptions",
            paper="arXiv:2403.07691 eq. 6 and 7",
        ),
        PreferenceRow(
            name="kto",
            target="engines.algorithms.preference.kto:kto_loss",
            options=f"{_PREFERENCE_OPTIONS}:KtoOptions",
            paper="arXiv:2402.01306 eq. 8",
            paired=False,
        ),
    ],
    PreferenceRow,
)

BRADLEY_TERRY = PreferenceRow(
    name="bradley_terry",
    target=f"{_PAIRS}:bradley_terry_loss",
    options=f"{_PREFERENCE_OPTIONS}:RewardModelOptions",
    paper="arXiv:2204.05862; margins arXiv:2307.09288 eq. 2; centering arXiv:2312.09244",
)
"""The only loss of a reward model, so no setting names it."""
