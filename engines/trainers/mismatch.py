"""How far the rollout engine's probabilities are from the trainer's, for the same tokens.

The most telling health figure of a colocated RL run: stale or damaged weights, another
sampling distribution and numerical drift all show here first. Measured in every step, inside
the training pass itself, so it costs no pass of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.algorithms.aggregation import token_mean
from engines.algorithms.policy_objective import PolicyObjective
from engines.errors import WeightSyncError
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch, TrainMetrics

LOGPROB_MAX = "mismatch/logprob_abs_max"


@dataclass(frozen=True)
class MeasuredObjective:
    """A policy objective that also reports differences of probabilities, under verl's names.

    Attributes:
        objective: the loss; it reports the differences of log-probabilities itself.
        needs_entropy: as the objective.
    """

    objective: PolicyObjective
    needs_entropy: bool = True

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """The objective's loss, with `training/rollout_probs_diff_*` added to its metrics."""
        output = self.objective(outputs, batch, counts)
        mask_T = batch.columns["loss_mask"] > 0
        trained_T = batch.columns.get("old_logprobs", outputs.logprobs_T.detach())
        difference_T = (trained_T.exp() - batch.columns["rollout_logprobs"].exp()).abs()
        mean = token_mean(difference_T, mask_T, counts)
        largest = torch.where(mask_T, difference_T, 0.0).amax()
        return LossOutput(
            output.loss,
            {**output.metrics, "training/rollout_probs_diff_mean": mean},
            {**output.maxima, "training/rollout_probs_diff_max": largest},
        )


def check_mismatch(updates: Sequence[TrainMetrics], max_logprob_diff: float | None) -> None:
    """Stop a run whose sampler and trainer disagree about the same tokens.

    Args:
        updates: optimizer steps of one RL step.
        max_logprob_diff: the bound; None checks nothing.

    Raises:
        WeightSyncError: the largest difference of a sampled token's logprob exceeds the bound.
    """
    largest = max((update.metrics[LOGPROB_MAX] for update in updates), default=0.0)
    if max_logprob_diff is not None and largest > max_logprob_diff:
        raise WeightSyncError(
            f"{LOGPROB_MAX} is {largest:.3g}, above max_logprob_diff {max_logprob_diff:.3g}: the "
            "rollout engine does not sample from the distribution that is trained"
        )
