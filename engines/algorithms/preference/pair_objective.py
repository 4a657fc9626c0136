"""The loss function of preference training on pairs.

Promises: the mean over the pairs of the step for every number of ranks or micro-batches; metrics
add up likewise. Reference logprobs are a column made beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engines.algorithms.preference.answers import (
    CHOSEN,
    MASK,
    REFERENCE,
    PairLoss,
    Pairs,
    answers_of,
    check_batch,
    pairs_of,
    share_of_pairs,
)
from engines.algorithms.preference.options import PairOptions
from engines.algorithms.preference.pair_losses import PairInputs
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch


@dataclass(frozen=True)
class PairObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    `loss` is a function of a module, so that the object can be sent to other processes.
    """

    loss: Callable[[PairInputs], PairLoss]
    options: PairOptions

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that the batch must have."""
        return frozenset({MASK, REFERENCE} if self.options.needs_reference else {MASK})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics, see `share_of_pairs`.

        Raises:
            ValueError: the batch lacks a column or the row `chosen`, or a unit is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("preference", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Return loss and rewards of each pair; raises as a call."""
        check_batch(batch, self.required_columns, [CHOSEN])
        pairs = pairs_of(batch)
        answers = answers_of(outputs.logprobs_T, batch, reference=self.options.needs_reference)
        chosen, rejected = answers.take(pairs.chosen_P), answers.take(pairs.rejected_P)
        return self.loss(PairInputs(chosen, rejected, self.options)), pairs
