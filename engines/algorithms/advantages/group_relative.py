"""Advantages relative to the other samples of the same prompt, and answers selected to imitate.

Promises: one value per sample, on each of its trained tokens. Groups are independent, except where
a function says that it uses the whole step. Before whitening, the relative value of equal scores or
of one sample is exactly 0, not a rounding error. A selection depends on the prompt's own answers,
not on their order; it keeps equal ones once, none without trained tokens, and may be empty.
Letters: B samples, P groups, R components of a score.
"""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from engines.algorithms.options import GdpoOptions, GpgOptions, RaftOptions
from engines.algorithms.parts import AdvantageInputs, Advantages, options_as
from engines.algorithms.sequences import (
    GroupStatistics,
    group_statistics,
    masked_whiten,
    num_trained_B,
)

STD_EPS = 1e-6


def grpo_advantages(inputs: AdvantageInputs) -> Advantages:
    """GRPO (arXiv:2402.03300): each sample's score relative to its group.

    With outcome rewards ``(R - mean) / (std + 1e-6)``, std with n - 1. With
    `norm_adv_by_std_in_grpo: false` it is Dr. GRPO (arXiv:2503.20783): ``R - mean``. Departure from
    the paper: eps is added to the std.
    """
    return Advantages.of_samples(
        _grpo_B(inputs.outcomes_B, inputs, inputs.algorithm.norm_adv_by_std_in_grpo), inputs.batch
    )


def grpo_passk_advantages(inputs: AdvantageInputs) -> Advantages:
    """Pass@k (arXiv:2503.19595): only the best sample of a group has an advantage.

    ``R_max - R_second`` for the best sample, divided by ``std + 1e-6`` unless
    `norm_adv_by_std_in_grpo` is false; 0 for all others, and for all if two are best. Not centred.
    """
    outcomes_B, group_B = inputs.outcomes_B, inputs.group_B
    groups = group_statistics(outcomes_B, group_B, inputs.num_groups)
    lowest_P = outcomes_B.new_full((inputs.num_groups,), -torch.inf)
    best_P = lowest_P.scatter_reduce(0, group_B, outcomes_B, "amax")
    is_best_B = outcomes_B == best_P[group_B]
    others_B = torch.where(is_best_B, -torch.inf, outcomes_B)
    second_P = lowest_P.scatter_reduce(0, group_B, others_B, "amax")
    num_best_P = torch.zeros_like(best_P).index_add(0, group_B, is_best_B.to(best_P))
    alone_B = is_best_B & ((num_best_P == 1) & (groups.count_P > 1))[group_B]
    values_B = torch.where(alone_B, (best_P - second_P)[group_B], 0.0)
    if inputs.algorithm.norm_adv_by_std_in_grpo:
        values_B = values_B / (groups.std_P + STD_EPS)[group_B]
    return Advantages.of_samples(values_B, inputs.batch)


def rloo_advantages(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE leave-one-out (arXiv:2402.14740): each sample relative to the mean of the others.

    ``R_i - sum of the other R / (n - 1)``, which is ``n / (n - 1) (R_i - mean)``.
    """
    outcomes_B = inputs.outcomes_B
    groups = group_statistics(outcomes_B, inputs.group_B, inputs.num_groups)
    factor_P = groups.count_P / (groups.count_P - 1).clamp(min=1)
    values_B = factor_P[inputs.group_B] * _centred_B(outcomes_B, groups, inputs.group_B)
    return Advantages.of_samples(values_B, inputs.batch)


def opo_advantages(inputs: AdvantageInputs) -> Advantages:
    """OPO (arXiv:2505.23585): relative to the mean weighted by length, the optimal baseline.

    ``R_i - sum(l R) / sum(l)`` over the group, l a sample's number of trained tokens. No constant
    baseline has less variance if an answer's squared gradient norm is proportional to its length.
    """
    outcomes_B, group_B = inputs.outcomes_B, inputs.group_B
    groups = group_statistics(outcomes_B, group_B, inputs.num_groups)
    lengths_B = num_trained_B(inputs.batch, inputs.mask_T).to(outcomes_B)
    zeros_P = torch.zeros_like(groups.mean_P)
    weighted_P = zeros_P.index_add(0, group_B, lengths_B * outcomes_B)
    length_P = zeros_P.index_add(0, group_B, lengths_B)
    baseline_B = (weighted_P / length_P.clamp(min=1))[group_B]
    values_B = torch.where(groups.equal_P[group_B], 0.0, outcomes_B - baseline_B)
    return Advantages.of_samples(values_B, inputs.batch)


def gpg_advantages(inputs: AdvantageInputs) -> Advantages:
    """GPG (arXiv:2504.02546): centred scores, scaled up for groups without a gradient.

    ``alpha (R - mean) / f_norm`` with ``alpha = B / (B - M)``, M samples in groups whose scores are
    all equal: their zero gradient would shrink the mean over the step. alpha, the metric
    `critic/gpg_alpha`, uses the whole step.
    """
    options = options_as(GpgOptions, inputs.options)
    outcomes_B = inputs.outcomes_B
    groups = group_statistics(outcomes_B, inputs.group_B, inputs.num_groups)
    num_silent = int(groups.equal_P[inputs.group_B].sum())
    alpha = outcomes_B.numel() / max(1, outcomes_B.numel() - num_silent)
    centred_B = _centred_B(outcomes_B, groups, inputs.group_B)
    of_samples = Advantages.of_samples(alpha * centred_B / options.f_norm, inputs.batch)
    return Advantages(of_samples.advantages_T, metrics={"critic/gpg_alpha": alpha})


def reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++ with baseline (arXiv:2501.03262): centred per group, whitened over the step.

    ``R - mean`` of the group on each trained token, then whitened over all trained tokens of the
    step. Since answers differ in length, whitening also moves groups of equal scores away from 0,
    unless the scores are equal in every group.
    """
    outcomes_B = inputs.outcomes_B
    groups = group_statistics(outcomes_B, inputs.group_B, inputs.num_groups)
    return _whitened(_centred_B(outcomes_B, groups, inputs.group_B), inputs)


def gdpo_advantages(inputs: AdvantageInputs) -> Advantages:
    """GDPO (arXiv:2601.05242): each component of the score is normalised, then they are summed.

    ``sum_k w_k (s_k - mean) / (std + 1e-6)`` of the group, whitened over all trained tokens of the
    step, so a component with a large range does not dominate. A KL in the reward is no component
    and is not included. Options: `gdpo_reward_keys`, by default the only component, and
    `gdpo_reward_weights`, by default 1 each; see `engines.config.rules.models`.

    Raises:
        ValueError: the reward lacks a named component, or has several and none is named.
    """
    options = options_as(GdpoOptions, inputs.options)
    # The components that a step's samples share by chance must not decide what is compared.
    keys = options.gdpo_reward_keys or inputs.components
    weights = options.gdpo_reward_weights or (1.0,) * len(keys)
    is_open = options.gdpo_reward_keys is None and len(inputs.components) > 1
    if is_open or not {*keys} <= {*inputs.components}:
        raise ValueError(
            f"gdpo: got gdpo_reward_keys {options.gdpo_reward_keys}; need some of the components "
            f"that the reward gives, {list(inputs.components)}"
        )
    columns = [inputs.scores_BR[:, inputs.components.index(key)] for key in keys]
    total_B = torch.zeros_like(inputs.scores_BR[:, 0])
    for weight, component_B in zip(weights, columns, strict=True):
        total_B = total_B + weight * _grpo_B(component_B, inputs, by_std=True)
    return _whitened(total_B, inputs)


def _grpo_B(scores_B: Tensor, inputs: AdvantageInputs, by_std: bool) -> Tensor:
    groups = group_statistics(scores_B, inputs.group_B, inputs.num_groups)
    centred_B = _centred_B(scores_B, groups, inputs.group_B)
    return centred_B / (groups.std_P + STD_EPS)[inputs.group_B] if by_std else centred_B


def _centred_B(scores_B: Tensor, groups: GroupStatistics, group_B: Tensor) -> Tensor:
    return torch.where(groups.equal_P[group_B], 0.0, scores_B - groups.mean_P[group_B])


def _whitened(values_B: Tensor, inputs: AdvantageInputs) -> Advantages:
    return Advantages(
        masked_whiten(values_B[inputs.batch.sequence_index_T], inputs.mask_T).to(torch.float32)
    )


def raft_advantages(inputs: AdvantageInputs) -> Advantages:
    """RAFT (arXiv:2304.06767 alg. 1): 1 for the best answers to each prompt, 0 for the others.

    With the loss `reinforce` a step is supervised fine-tuning on them: the mean of ``-log pi`` over
    their tokens. With `vanilla` it is RAFT++ (arXiv:2504.11343 sec. 3), which clips the ratio. The
    paper keeps one answer per prompt; `raft_num_kept` distinct ones with a minimum reward are
    rejection sampling fine-tuning (arXiv:2308.01825 sec. 3.3). Of answers with equal rewards, those
    with the smaller `uniform` number on their last token come first.
    """
    options = options_as(RaftOptions, inputs.options)
    kept_B = best_answers(inputs, options.raft_num_kept, options.raft_min_reward)
    metrics = {"critic/num_kept_samples": float(kept_B.sum())}
    return replace(
        Advantages.of_samples(kept_B.to(torch.float64), inputs.batch),
        kept_B=kept_B,
        metrics=metrics,
    )


def best_answers(inputs: AdvantageInputs, num_kept: int, min_reward: float | None) -> Tensor:
    """Return (B,) bool, at most `num_kept` distinct answers per prompt with the largest rewards.

    Answers that earned less than `min_reward` are not kept; None: any reward.
    """
    sizes = num_trained_B(inputs.batch, inputs.mask_T).tolist()
    answers = inputs.batch.input_ids_T[inputs.mask_T].split(sizes)
    draws = inputs.batch.columns["uniform"][inputs.mask_T].split(sizes)
    outcomes, groups = inputs.outcomes_B.tolist(), inputs.group_B.tolist()
    candidates = [
        i
        for i, size in enumerate(sizes)
        if size and (min_reward is None or outcomes[i] >= min_reward)
    ]
    candidates.sort(key=lambda i: (-outcomes[i], float(draws[i][-1])))
    kept_B = torch.zeros(len(sizes), dtype=torch.bool)
    chosen: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for i in candidates:
        answer, of_prompt = tuple(answers[i].tolist()), chosen[groups[i]]
        if answer not in of_prompt and len(of_prompt) < num_kept:
            of_prompt.add(answer)
            kept_B[i] = True
    return kept_B
