"""The loss function of preference training on pairs.

Promises: the mean over the pairs of the step, whatever the number of ranks or micro-batches;
metrics are shares that add up, likewise.
Does not promise reference logprobs; those are a column made beforehand, as in RL.
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

    Attributes:
        loss: of a pair; a function of a module, so that the object travels to other processes.
        options: of the loss.
    """

    loss: Callable[[PairInputs], PairLoss]
    options: PairOptions

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns the batch must carry."""
        return frozenset({MASK, REFERENCE} if self.options.needs_reference else {MASK})

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """This micro-batch's share.

        Args:
            outputs: of a language model.
            batch: whole pairs, as units with the row `chosen`; with the `required_columns`.
            counts: of the step.

        Returns:
            The loss, with `preference/` and `loss`, `accuracy`, `margin`, `chosen_reward`,
            `rejected_reward`; see `share_of_pairs`.

        Raises:
            ValueError: the batch lacks something, or a unit is no pair.
        """
        found, pairs = self.of_pairs(outputs, batch)
        return share_of_pairs("preference", found, pairs, counts)

    def of_pairs(self, outputs: ModelOutputs, batch: TokenBatch) -> tuple[PairLoss, Pairs]:
        """Loss and rewards of each pair; arguments and errors as of a call."""
        check_batch(batch, self.required_columns, [CHOSEN])
        pairs = pairs_of(batch)
        answers = answers_of(outputs.logprobs_T, batch, reference=self.options.needs_reference)
        chosen, rejected = answers.take(pairs.chosen_P), answers.take(pairs.rejected_P)
        return self.loss(PairInputs(chosen, rejected, self.options)), pairs
