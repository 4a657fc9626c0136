"""Advantages from returns to go: with a critic, and with baselines that need none.

The baseline of each token that minimises the variance of the gradient (arXiv:2602.07078) weights
answers by their energy up to the token: the sum of ``1 - 2 pi + sum of pi^2`` over the tokens so
far, each the squared norm of the gradient of ``log pi`` with respect to the logits. The forward
pass gives it.
Promises: tokens that are not trained on (of an environment or a tool) are skipped: value, return
and advantage before them equal those after them.
Letters: B samples, T tokens, P groups, L trained tokens of the longest sample, K places (tokens or
turns).
"""

import torch
from torch import Tensor

from engines.algorithms.options import DiscountOptions, GaeOptions
from engines.algorithms.parts import AdvantageInputs, Advantages, options_as
from engines.algorithms.sequences import TrainedTokens, masked_whiten

_ROUNDING = 1e-9
"""Relative tolerance: far above a float64 sum's rounding, far below a critic's in float32."""


def discounted_sums(values_BL: Tensor, factor_B: Tensor) -> Tensor:
    """Return (B, L) ``y_t = x_t + factor y_{t+1}``, computed from the right.

    Args:
        values_BL: float64, 0 after the end of a row.
    """
    sums_BL = torch.empty_like(values_BL)
    carried_B = torch.zeros_like(factor_B)
    for place in reversed(range(values_BL.shape[1])):
        carried_B = values_BL[:, place] + factor_B * carried_B
        sums_BL[:, place] = carried_B
    return sums_BL


def gae_advantages(inputs: AdvantageInputs) -> Advantages:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16), decoupled, length-adaptive.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, with V_t the
    value of the state in which token t is chosen. V after the last token is 0. For a truncated
    answer it is the critic's value there (row `last_values`), unless `bootstrap_truncated` is off.
    The critic's targets are ``A_t + V_t`` with `lam_critic` (VAPO, arXiv:2504.05118 sec. 4.1, uses
    1: unbiased targets) and are never whitened. The advantages use `lam`, or ``1 - 1 / (alpha l)``
    for an answer of l tokens (sec. 4.1 eq. 8; not below 0), and are whitened unless `whiten` is
    off. Reads column `values`; metric `critic/vf_explained_var`.
    """
    options = options_as(GaeOptions, inputs.options)
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    deltas_BL, values_BL = _deltas(inputs, tokens, options)
    lam_critic = options.lam if options.lam_critic is None else options.lam_critic
    lengths_B = tokens.mask_BL.sum(dim=1).to(torch.float64)
    lam_B = torch.full_like(lengths_B, options.lam)
    if options.length_adaptive_alpha is not None:
        scale_B = options.length_adaptive_alpha * lengths_B
        lam_B = (1 - 1 / scale_B.clamp(min=1)).clamp(min=0)
    factor_B = options.gamma * lam_B
    raw_BL = discounted_sums(deltas_BL, factor_B)
    returns_BL = values_BL + discounted_sums(
        deltas_BL, torch.full_like(factor_B, options.gamma * lam_critic)
    )
    advantages_T = tokens.column(raw_BL)
    if options.whiten:
        advantages_T = masked_whiten(advantages_T, inputs.mask_T)
    returns_N, values_N = returns_BL[tokens.mask_BL], values_BL[tokens.mask_BL]
    return Advantages(
        advantages_T.to(torch.float32),
        tokens.column(returns_BL).to(torch.float32),
        {"critic/vf_explained_var": explained_variance(values_N, returns_N)},
    )


def reinforce_plus_plus_advantages(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE++ (arXiv:2501.03262): returns to go, whitened over the step.

    ``G_t = r_t + gamma G_{t+1}``, then mean 0 and variance 1 over all trained tokens of the step;
    there are no groups. Exactly 0 if all returns are equal.
    """
    returns_T = _returns_to_go(inputs)
    return Advantages(masked_whiten(returns_T, inputs.mask_T).to(torch.float32))


def remax_advantages(inputs: AdvantageInputs) -> Advantages:
    """ReMax (arXiv:2310.10505): return to go minus the score of the prompt's greedy answer.

    ``G_t - R(greedy)``, row `greedy_scores` (B,). The baseline does not depend on the sample, so it
    adds no bias, and it needs only one more answer per prompt. Not centred.
    """
    returns_T = _returns_to_go(inputs)
    baseline_T = inputs.batch.rows["greedy_scores"].to(returns_T)[inputs.batch.sequence_index_T]
    return Advantages(torch.where(inputs.mask_T, returns_T - baseline_T, 0.0).to(torch.float32))


def explained_variance(values_N: Tensor, targets_N: Tensor) -> float:
    """Return ``1 - var(targets - values) / var(targets)``; 0 if the targets do not vary."""
    if targets_N.numel() < 2:
        return 0.0
    # A target is a sum with values, so equal targets differ by their rounding error.
    largest = torch.maximum(targets_N.abs().max(), values_N.abs().max())
    if bool(targets_N.max() - targets_N.min() <= _ROUNDING * largest):
        return 0.0
    return float(1 - (targets_N - values_N).var() / targets_N.var())


def _returns_to_go(inputs: AdvantageInputs) -> Tensor:
    options = options_as(DiscountOptions, inputs.options)
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    rewards_BL = tokens.matrix(inputs.rewards_T)
    factor_B = rewards_BL.new_full((rewards_BL.shape[0],), options.gamma)
    return tokens.column(discounted_sums(rewards_BL, factor_B))


def _deltas(
    inputs: AdvantageInputs, tokens: TrainedTokens, options: GaeOptions
) -> tuple[Tensor, Tensor]:
    values_BL = tokens.matrix(inputs.batch.columns["values"].to(torch.float64))
    next_BL = torch.zeros_like(values_BL)
    next_BL[:, :-1] = values_BL[:, 1:]
    if options.bootstrap_truncated:
        bootstrap_B = inputs.batch.rows["last_values"].to(torch.float64) * inputs.truncated_B
        lengths_B = tokens.mask_BL.sum(dim=1)
        has_B = lengths_B > 0
        next_BL[has_B.nonzero().flatten(), lengths_B[has_B] - 1] = bootstrap_B[has_B]
    deltas_BL = tokens.matrix(inputs.rewards_T) + options.gamma * next_BL - values_BL
    return torch.where(tokens.mask_BL, deltas_BL, 0.0), values_BL


def optimal_token_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """Subtract from each return to go the group's mean, weighted by the answers' energy so far.

    ``A_t = G_t - B_t`` with ``B_t = sum_i G_it W_it / sum_i W_it`` over the answers of the group
    that have a token t, and ``W_it = sum_{j <= t} (1 - 2 pi_ij + sum pi_ij^2)``; exactly 0 if all
    returns of the group are equal at t, so also if only one answer is that long. Departure: if no
    answer has any energy (every token was certain) the mean is not weighted.

    Reads the columns `old_logprobs` and `sum_pi_squared`.
    """
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    returns_BL, energy_BL = _returns_and_energy(inputs, tokens)
    return Advantages(
        tokens.column(
            returns_BL - _weighted_mean(returns_BL, energy_BL, tokens.mask_BL, inputs)
        ).to(torch.float32)
    )


def turn_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """As `optimal_token_baseline_advantages`, with one baseline per turn of a conversation.

    A turn is a run of consecutive tokens of the policy. The n-th turn of an answer is compared with
    the n-th turns of the group's other answers, by the return to go at its first token, weighted by
    the energy up to its last one.
    """
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    returns_BL, energy_BL = _returns_and_energy(inputs, tokens)
    turn_BL = tokens.matrix(_turns_T(inputs)).to(torch.int64)
    num_turns = int(turn_BL.max()) + 1 if turn_BL.numel() else 0
    first_BK, last_BK = _turn_ends(turn_BL, tokens.mask_BL, num_turns)
    there_BK = last_BK >= 0
    at_first_BK = torch.where(there_BK, returns_BL.gather(1, first_BK.clamp(min=0)), 0.0)
    to_last_BK = torch.where(there_BK, energy_BL.gather(1, last_BK.clamp(min=0)), 0.0)
    baseline_BK = _weighted_mean(at_first_BK, to_last_BK, there_BK, inputs)
    return Advantages(tokens.column(returns_BL - baseline_BK.gather(1, turn_BL)).to(torch.float32))


def _returns_and_energy(inputs: AdvantageInputs, tokens: TrainedTokens) -> tuple[Tensor, Tensor]:
    rewards_BL = tokens.matrix(inputs.rewards_T)
    returns_BL = discounted_sums(rewards_BL, rewards_BL.new_ones(rewards_BL.shape[0]))
    columns = inputs.batch.columns
    probability_T = columns["old_logprobs"].to(torch.float64).exp()
    norm_T = 1 - 2 * probability_T + columns["sum_pi_squared"].to(torch.float64)
    return returns_BL, tokens.matrix(norm_T.clamp(min=0)).cumsum(dim=1)


def _weighted_mean(
    values_BK: Tensor, weights_BK: Tensor, there_BK: Tensor, inputs: AdvantageInputs
) -> Tensor:
    """Return (B, K) each group's weighted mean per place; the value itself if all are equal."""
    group_B, shape = inputs.group_B, (inputs.num_groups, values_BK.shape[1])

    def total(of_BK: Tensor) -> Tensor:
        return of_BK.new_zeros(shape).index_add(0, group_B, torch.where(there_BK, of_BK, 0.0))

    weights_BK = torch.where((total(weights_BK) <= 0)[group_B], 1.0, weights_BK)
    mean_PK = total(values_BK * weights_BK) / total(weights_BK).clamp(min=1e-300)
    index_BK = group_B[:, None].expand_as(values_BK)
    ends = []
    for how, missing in (("amin", torch.inf), ("amax", -torch.inf)):
        empty_PK = values_BK.new_full(shape, missing)
        ends.append(
            empty_PK.scatter_reduce(0, index_BK, torch.where(there_BK, values_BK, missing), how)
        )
    return torch.where((ends[0] == ends[1])[group_B], values_BK, mean_PK[group_B])


def _turns_T(inputs: AdvantageInputs) -> Tensor:
    """Return (T,) float64, for each trained token the number of turns before its own."""
    batch, mask_T = inputs.batch, inputs.mask_T
    before_T = torch.cat([mask_T.new_zeros(1), mask_T[:-1]]) & (batch.position_ids_T > 0)
    starts_T = (mask_T & ~before_T).to(torch.float64)
    so_far_T = starts_T.cumsum(0)
    first_B = batch.cu_seqlens[:-1].to(torch.int64)
    of_earlier_B = so_far_T[first_B] - starts_T[first_B]
    return (so_far_T - of_earlier_B[batch.sequence_index_T] - 1).clamp(min=0)


def _turn_ends(turn_BL: Tensor, mask_BL: Tensor, num_turns: int) -> tuple[Tensor, Tensor]:
    """Return (B, K) columns of the first and last token of each turn; -1 for an absent turn."""
    place_BL = torch.arange(turn_BL.shape[1], device=turn_BL.device).expand_as(turn_BL)
    none_BK = turn_BL.new_full((turn_BL.shape[0], num_turns), -1)
    last_BK = none_BK.scatter_reduce(1, turn_BL, torch.where(mask_BL, place_BL, -1), "amax")
    first_BK = torch.full_like(none_BK, turn_BL.shape[1]).scatter_reduce(
        1, turn_BL, torch.where(mask_BL, place_BL, turn_BL.shape[1]), "amin"
    )
    return torch.where(last_BK >= 0, first_BK, -1), last_BK
