"""The loss function of a reward model: the better of two answers should get the larger score.

A score is the output of a value model behind the last token of a sequence, as the role `reward`
reads it. Promises: the mean over the pairs of the step for every number of ranks or micro-batches;
metrics add up likewise. Margins are a row made beforehand.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engines.algorithms.preference.answers import (
    CHOSEN,
    MARGIN,
    MASK,
    PairLoss,
    Pairs,
    check_batch,
    pairs_of,
    share_of_pairs,
)
from engines.algorithms.preference.options import RewardModelOptions
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch

BEHIND = Readouts(last_values=True)


def bradley_terry_loss(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None, options: RewardModelOptions
) -> PairLoss:
    """Bradley-Terry: ``-log sigmoid(s_w - s_l - a m) + c (s_w + s_l)^2``; rewards are the scores.

    The first term is that of arXiv:2204.05862, with the margin m of Llama 2 (arXiv:2307.09288
    eq. 2); the second that of arXiv:2312.09244: a comparison does not determine a constant added to
    both scores. a is `margin_coef`, c is `center_coef`; `margin_P` None is 0.
    """
    gap_P = chosen_P - rejected_P
    if margin_P is not None:
        gap_P = gap_P - options.margin_coef * margin_P
    centre_P = options.center_coef * (chosen_P + rejected_P).square()
    return PairLoss(centre_P - logsigmoid(gap_P), chosen_P, rejected_P)


@dataclass(frozen=True)
class RewardModelObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`."""

    options: RewardModelOptions
    readouts: Readouts = BEHIND

    @property
    def required_rows(self) -> frozenset[str]:
        """Rows that the batch must have."""
        return frozenset({CHOSEN, MARGIN} if self.options.margin_coef else {CHOSEN})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Args:
            batch: whole pairs, as units with the `required_rows` (of margins the chosen answer's
                counts). A pair counts if `loss_mask` is set on any of its tokens but the first.

        Raises:
            ValueError: the outputs are of a language model, the batch lacks something, or a unit
                is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("reward_model", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and scores of each pair; raises as a call."""
        if outputs.last_values_B is None:
            raise ValueError("a reward model's loss needs a value model and its last_values")
        check_batch(batch, [MASK], self.required_rows)
        pairs, scores_B = pairs_of(batch), outputs.last_values_B.to(torch.float64)
        margin_P = batch.rows[MARGIN][pairs.chosen_P] if self.options.margin_coef else None
        found = bradley_terry_loss(
            scores_B[pairs.chosen_P], scores_B[pairs.rejected_P], margin_P, self.options
        )
        return found, pairs
