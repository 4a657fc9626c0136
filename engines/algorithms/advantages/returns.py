"""Advantages from returns to go, with and without a critic.

Promises: tokens that are not trained on (of an environment or a tool) are skipped: value, return
and advantage before them equal those behind them.
Letters: B samples, T tokens, L trained tokens of the longest sample.
"""

import torch
from torch import Tensor

from engines.algorithms.options import DiscountOptions, GaeOptions
from engines.algorithms.parts import AdvantageInputs, Advantages, options_as
from engines.algorithms.sequences import TrainedTokens, masked_whiten

_ROUNDING = 1e-9
"""Relative; far above that of a float64 sum, far below that of a critic's float32."""


def discounted_sums(values_BL: Tensor, factor_B: Tensor) -> Tensor:
    """Return (B, L) ``y_t = x_t + factor y_{t+1}``, computed from the right.

    Args:
        values_BL: float64, 0 behind the end of a row.
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
    value of the state in which token t is chosen. V behind the last token is 0. For a truncated
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
    factor_B = options.gamma * _policy_lam_B(tokens, options)
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
    _, returns_T = _returns_to_go(inputs)
    return Advantages(masked_whiten(returns_T, inputs.mask_T).to(torch.float32))


def remax_advantages(inputs: AdvantageInputs) -> Advantages:
    """ReMax (arXiv:2310.10505): return to go minus the score of the prompt's greedy answer.

    ``G_t - R(greedy)``, row `greedy_scores` (B,). The baseline does not depend on the sample, so it
    adds no bias, and it needs only one more answer per prompt. Not centred.
    """
    _, returns_T = _returns_to_go(inputs)
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


def _returns_to_go(inputs: AdvantageInputs) -> tuple[TrainedTokens, Tensor]:
    options = options_as(DiscountOptions, inputs.options)
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    rewards_BL = tokens.matrix(inputs.rewards_T)
    factor_B = rewards_BL.new_full((rewards_BL.shape[0],), options.gamma)
    return tokens, tokens.column(discounted_sums(rewards_BL, factor_B))


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


def _policy_lam_B(tokens: TrainedTokens, options: GaeOptions) -> Tensor:
    lengths_B = tokens.mask_BL.sum(dim=1).to(torch.float64)
    if options.length_adaptive_alpha is None:
        return torch.full_like(lengths_B, options.lam)
    scale_B = options.length_adaptive_alpha * lengths_B
    return (1 - 1 / scale_B.clamp(min=1)).clamp(min=0)
