"""Answers and pairs of answers in a packed batch, and their share of a step.

A pair is a unit of two sequences; the row `chosen` is 1 for one and 0 for the other. A micro-batch
holds whole pairs, in any order. `GlobalCounts.num_units` counts pairs with a trained token.
Letters: N answers, P pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.sequences import num_trained_B, sum_by_sequence
from engines.types import GlobalCounts, LossOutput, TokenBatch

MASK, REFERENCE = "loss_mask", "ref_logprobs"
CHOSEN, MARGIN = "chosen", "margin"


@dataclass(frozen=True)
class Answers:
    """Sums of logprobs of N answers over their trained tokens, float64 with gradient.

    `log_ratio_N` is log pi(y|x) - log pi_ref(y|x); log pi(y|x) alone if the loss uses no reference.
    """

    log_ratio_N: Tensor
    num_tokens_N: Tensor
    logprob_N: Tensor

    @property
    def mean_log_ratio_N(self) -> Tensor:
        """(N,) mean log-ratio per token; 0 for an answer without trained tokens."""
        return self.log_ratio_N / self.num_tokens_N.clamp(min=1)

    @property
    def mean_logprob_N(self) -> Tensor:
        """(N,) mean logprob per token; 0 for an answer without trained tokens."""
        return self.logprob_N / self.num_tokens_N.clamp(min=1)

    def take(self, places: Tensor) -> "Answers":
        """Return the answers at the (P,) places."""
        return Answers(self.log_ratio_N[places], self.num_tokens_N[places], self.logprob_N[places])


def answers_of(logprobs_T: Tensor, batch: TokenBatch, *, reference: bool) -> Answers:
    """Sum the logprobs of each sequence's trained tokens.

    With `reference` the column `ref_logprobs` is subtracted token by token, since sums of thousands
    of nats would lose the difference.
    """
    mask_T = batch.columns[MASK] > 0

    def total(values_T: Tensor) -> Tensor:
        return sum_by_sequence(torch.where(mask_T, values_T, 0.0).to(torch.float64), batch)

    logprob_N = total(logprobs_T)
    return Answers(
        total(logprobs_T - batch.columns[REFERENCE]) if reference else logprob_N,
        num_trained_B(batch, mask_T),
        logprob_N,
    )


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, in the order of their units, as (P,) int64 sequence indices.

    `counted_P`, bool, is True if a token of either answer is trained on.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    counted_P: Tensor


def pairs_of(batch: TokenBatch) -> Pairs:
    """Find the two sequences of each unit (`unit_B`) by the row `chosen`.

    Raises:
        ValueError: there are no units, or one is not a chosen and a rejected answer.
    """
    unit_B = batch.unit_B
    if unit_B is None:
        raise ValueError("a loss over pairs needs unit_B: the batch has no units")
    is_chosen_B = batch.rows[CHOSEN] > 0
    sides = [side_B.nonzero().flatten() for side_B in (is_chosen_B, ~is_chosen_B)]
    chosen_P, rejected_P = (places[unit_B[places].argsort()] for places in sides)
    units_P = unit_B[chosen_P]
    if not torch.equal(units_P, unit_B[rejected_P]) or bool((units_P.diff() == 0).any()):
        raise ValueError(
            f"{unit_B.unique().numel()} units have {chosen_P.numel()} chosen and "
            f"{rejected_P.numel()} rejected answers; need one of each in every unit"
        )
    trained_B = num_trained_B(batch, batch.columns[MASK] > 0) > 0
    return Pairs(chosen_P, rejected_P, trained_B[chosen_P] | trained_B[rejected_P])


@dataclass(frozen=True)
class PairLoss:
    """Result of a loss over pairs: (P,) loss with gradient, and the rewards that it compares."""

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def share_of_pairs(prefix: str, found: PairLoss, pairs: Pairs, counts: GlobalCounts) -> LossOutput:
    """Return this micro-batch's share of the means over the pairs of the step, in float64.

    Metrics: `loss`, `accuracy` (a tie counts half), `margin`, `chosen_reward`, `rejected_reward`.
    """

    def share(values_P: Tensor) -> Tensor:
        return torch.where(pairs.counted_P, values_P, 0.0).sum() / max(counts.num_units, 1)

    chosen_P, rejected_P = found.chosen_reward_P.detach(), found.rejected_reward_P.detach()
    margin_P = chosen_P - rejected_P
    loss = share(found.loss_P)
    metrics = {
        "loss": loss.detach(),
        "accuracy": share(right_side(margin_P)),
        "margin": share(margin_P),
        "chosen_reward": share(chosen_P),
        "rejected_reward": share(rejected_P),
    }
    return LossOutput(loss, {f"{prefix}/{name}": value for name, value in metrics.items()})


def right_side(margin_N: Tensor) -> Tensor:
    """Return (N,) 1 where a margin is above 0, 0 below, and 0.5 at 0."""
    return (margin_N.sign() + 1) / 2
