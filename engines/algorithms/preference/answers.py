"""Answers and pairs of answers in a packed batch, and the share of a step that they make up.

A pair is a unit of two sequences, of which the row `chosen` is 1 for one and 0 for the other.
Promises: units are never torn apart, so a micro-batch holds whole pairs, in whatever order; sums
over answers are in float64. A pair counts if a token of it is trained on, which is what
`GlobalCounts.num_units` counts; those of a filler do not.
Letters: N answers, P pairs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.algorithms.sequences import num_trained_B, sum_by_sequence
from engines.types import GlobalCounts, LossOutput, TokenBatch

MASK, REFERENCE = "loss_mask", "ref_logprobs"
CHOSEN, MARGIN = "chosen", "margin"


@dataclass(frozen=True)
class Answers:
    """What policy and reference say of N answers.

    Attributes:
        log_ratio_N: (N,) float64 log pi(y|x) - log pi_ref(y|x), a sum over the trained tokens, with
            gradient; log pi(y|x) alone where the loss takes no reference.
        num_tokens_N: (N,) int64 trained tokens.
        logprob_N: (N,) float64 log pi(y|x), likewise a sum with gradient.
    """

    log_ratio_N: Tensor
    num_tokens_N: Tensor
    logprob_N: Tensor

    @property
    def mean_log_ratio_N(self) -> Tensor:
        """(N,) the same for each token; 0 of an answer without one."""
        return self.log_ratio_N / self.num_tokens_N.clamp(min=1)

    @property
    def mean_logprob_N(self) -> Tensor:
        """(N,) of a token; 0 of an answer without one."""
        return self.logprob_N / self.num_tokens_N.clamp(min=1)

    def take(self, places: Tensor) -> "Answers":
        """Those at the (P,) places."""
        return Answers(self.log_ratio_N[places], self.num_tokens_N[places], self.logprob_N[places])


def answers_of(logprobs_T: Tensor, batch: TokenBatch, *, reference: bool) -> Answers:
    """Add up the trained tokens of each sequence.

    Args:
        logprobs_T: (T,) of the policy, with or without gradient.
        batch: with the column `loss_mask` and, to compare, `ref_logprobs`.
        reference: whether to compare with it. The difference is taken token by token, before
            sums of some thousand nats could swallow it.

    Returns:
        One answer for each sequence.
    """
    mask_T = batch.columns[MASK] > 0

    def total(values_T: Tensor) -> Tensor:
        return sum_by_sequence(torch.where(mask_T, values_T, 0.0).to(torch.float64), batch)

    logprob_N = total(logprobs_T)
    log_ratio_N = total(logprobs_T - batch.columns[REFERENCE]) if reference else logprob_N
    return Answers(log_ratio_N, num_trained_B(batch, mask_T), logprob_N)


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, in the order of their units.

    Attributes:
        chosen_P: (P,) int64, which sequence the chosen answer is.
        rejected_P: (P,) int64, likewise.
        counted_P: (P,) bool, whether a token of either is trained on.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    counted_P: Tensor


def pairs_of(batch: TokenBatch) -> Pairs:
    """Find who belongs to whom.

    Args:
        batch: with `unit_B`, the row `chosen` and the column `loss_mask`.

    Returns:
        As many pairs as there are units.

    Raises:
        ValueError: a unit is not one chosen and one rejected answer.
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
    """What a loss over pairs returns.

    Attributes:
        loss_P: (P,) with gradient.
        chosen_reward_P: (P,) the reward of the chosen answer that the loss compares.
        rejected_reward_P: (P,) of the rejected one.
    """

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def share_of_pairs(prefix: str, found: PairLoss, pairs: Pairs, counts: GlobalCounts) -> LossOutput:
    """This micro-batch's share of the means over the pairs of the step.

    Args:
        prefix: of the metrics' names.
        found: loss and rewards of each pair.
        pairs: which of them count.
        counts: of the step.

    Returns:
        The loss in float64, with `loss`, `accuracy` (a tie counts half), `margin`, `chosen_reward`
        and `rejected_reward`.
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
    """(N,) 1 where a margin is above 0, 0 below, and a half at 0, as a coin would have it."""
    return (margin_N.sign() + 1) / 2


def check_batch(batch: TokenBatch, columns: Iterable[str], rows: Iterable[str]) -> None:
    """Refuse a batch that lacks what a loss reads.

    Args:
        batch: of any kind.
        columns: per-token columns that it has to carry.
        rows: values of sequences that it has to carry.

    Raises:
        ValueError: names what is missing, and what there is.
    """
    for what, needed, there in (("columns", columns, batch.columns), ("rows", rows, batch.rows)):
        missing = sorted({*needed} - there.keys())
        if missing:
            raise ValueError(f"needs the {what} {missing}; the batch has {sorted(there)}")
