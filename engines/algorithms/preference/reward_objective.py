"""The loss function of a reward model: of two answers the better one gets the larger score.

A score is what a value model says behind the last token of a sequence, as the role `reward` reads
it. Promises: the mean over the pairs of the step, whatever the number of ranks or micro-batches;
metrics are shares that add up, likewise.
Does not promise margins; those are a row made beforehand.
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
    """Bradley-Terry: ``-log sigmoid(s_w - s_l - a m) + c (s_w + s_l)^2``.

    The first term is that of arXiv:2204.05862, with the margin m of Llama 2 (arXiv:2307.09288
    eq. 2); the second that of arXiv:2312.09244: a comparison says nothing about a number that is
    added to both scores.

    Args:
        chosen_P: (P,) scores s_w.
        rejected_P: (P,) scores s_l.
        margin_P: (P,) m; None is 0.
        options: a is `margin_coef`, c `center_coef`.

    Returns:
        Rewards are the scores.
    """
    gap_P = chosen_P - rejected_P
    if margin_P is not None:
        gap_P = gap_P - options.margin_coef * margin_P
    centre_P = options.center_coef * (chosen_P + rejected_P).square()
    return PairLoss(centre_P - logsigmoid(gap_P), chosen_P, rejected_P)


@dataclass(frozen=True)
class RewardModelObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    Attributes:
        options: of the loss.
        readouts: a score stands behind the last token, which no prediction has.
    """

    options: RewardModelOptions
    readouts: Readouts = BEHIND

    @property
    def required_rows(self) -> frozenset[str]:
        """Rows the batch must carry."""
        return frozenset({CHOSEN, MARGIN} if self.options.margin_coef else {CHOSEN})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """This micro-batch's share.

        Args:
            outputs: of a value model.
            batch: whole pairs, as units with the `required_rows` (of margins that of the chosen
                answer counts) and the column `loss_mask`, which says that a pair is no filler: on
                a single token, but the first, is enough.
            counts: of the step.

        Returns:
            The loss, with `reward_model/` and `loss`, `accuracy`, `margin`, `chosen_reward`,
            `rejected_reward`; see `share_of_pairs`.

        Raises:
            ValueError: the outputs are of a language model, the batch lacks something, or a unit
                is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("reward_model", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Loss and scores of each pair; arguments and errors as of a call."""
        if outputs.last_values_B is None:
            raise ValueError("a reward model's loss needs a value model and its last_values")
        check_batch(batch, [MASK], self.required_rows)
        pairs, scores_B = pairs_of(batch), outputs.last_values_B.to(torch.float64)
        margin_P = batch.rows[MARGIN][pairs.chosen_P] if self.options.margin_coef else None
        found = bradley_terry_loss(
            scores_B[pairs.chosen_P], scores_B[pairs.rejected_P], margin_P, self.options
        )
        return found, pairs
