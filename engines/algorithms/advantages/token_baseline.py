"""The baseline of each token that minimises the variance of the gradient (arXiv:2602.07078).

The squared norm of the gradient of ``log pi`` with respect to the logits is
``1 - 2 pi + sum of pi^2``, known from the forward pass. The energy of an answer up to token t is
the sum of these.
Letters: B samples, P groups, L trained tokens of the longest sample, K places (tokens or turns).
"""

import torch
from torch import Tensor

from engines.algorithms.advantages.returns import discounted_sums
from engines.algorithms.parts import AdvantageInputs, Advantages
from engines.algorithms.sequences import TrainedTokens


def optimal_token_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """Return to go minus the group's mean, weighted by the answers' energy so far.

    ``A_t = G_t - B_t`` with ``B_t = sum_i G_it W_it / sum_i W_it`` over the answers of the group
    that have a token t, and ``W_it = sum_{j <= t} (1 - 2 pi_ij + sum pi_ij^2)``; exactly 0 if all
    returns of the group are equal at t, so also if only one answer is that long. Departure: if no
    answer has any energy (every token was certain) the mean is not weighted.

    Reads the columns `old_logprobs` and `sum_pi_squared`.
    """
    tokens = TrainedTokens(inputs.mask_T, inputs.batch)
    returns_BL, energy_BL = _returns_and_energy(inputs, tokens)
    baseline_BL = _weighted_mean(returns_BL, energy_BL, tokens.mask_BL, inputs)
    return Advantages(tokens.column(returns_BL - baseline_BL).to(torch.float32))


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
    advantages_BL = returns_BL - baseline_BK.gather(1, turn_BL)
    return Advantages(tokens.column(advantages_BL).to(torch.float32))


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

    silent_PK = total(weights_BK) <= 0
    weights_BK = torch.where(silent_PK[group_B], 1.0, weights_BK)
    mean_PK = total(values_BK * weights_BK) / total(weights_BK).clamp(min=1e-300)
    index_BK = group_B[:, None].expand_as(values_BK)
    ends = []
    for how, missing in (("amin", torch.inf), ("amax", -torch.inf)):
        empty_PK = values_BK.new_full(shape, missing)
        present_BK = torch.where(there_BK, values_BK, missing)
        ends.append(empty_PK.scatter_reduce(0, index_BK, present_BK, how))
    equal_BK = (ends[0] == ends[1])[group_B]
    return torch.where(equal_BK, values_BK, mean_PK[group_B])


def _turns_T(inputs: AdvantageInputs) -> Tensor:
    """Return (T,) float64, for each trained token the number of turns before its own."""
    batch, mask_T = inputs.batch, inputs.mask_T
    before_T = torch.cat([mask_T.new_zeros(1), mask_T[:-1]])
    before_T = before_T & (batch.position_ids_T > 0)
    starts_T = (mask_T & ~before_T).to(torch.float64)
    so_far_T = starts_T.cumsum(0)
    first_B = batch.cu_seqlens[:-1].to(torch.int64)
    of_earlier_B = so_far_T[first_B] - starts_T[first_B]
    return (so_far_T - of_earlier_B[batch.sequence_index_T] - 1).clamp(min=0)


def _turn_ends(turn_BL: Tensor, mask_BL: Tensor, num_turns: int) -> tuple[Tensor, Tensor]:
    """Return (B, K) columns of the first and last token of each turn; -1 if there is none."""
    place_BL = torch.arange(turn_BL.shape[1], device=turn_BL.device).expand_as(turn_BL)
    none_BK = turn_BL.new_full((turn_BL.shape[0], num_turns), -1)
    last_BK = none_BK.scatter_reduce(1, turn_BL, torch.where(mask_BL, place_BL, -1), "amax")
    huge_BK = torch.full_like(none_BK, turn_BL.shape[1])
    first_BK = huge_BK.scatter_reduce(
        1, turn_BL, torch.where(mask_BL, place_BL, turn_BL.shape[1]), "amin"
    )
    return torch.where(last_BK >= 0, first_BK, -1), last_BK
