"""The loss of supervised fine-tuning."""

from dataclasses import dataclass

from engines.algorithms.aggregation import token_mean
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch


@dataclass(frozen=True)
class SupervisedLoss:
    """Mean negative log-likelihood of the tokens with loss mask 1, over the whole step."""

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the mean."""
        return LossOutput(token_mean(-outputs.logprobs_T, batch.columns["loss_mask"] > 0, counts))
