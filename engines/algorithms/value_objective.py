"""The loss function of a critic's update: squared error, clipped around the old values.

Promises: the mean over all trained tokens of the step for every number of ranks or micro-batches;
metrics add up likewise. Returns and values are columns made beforehand.
"""

from dataclasses import dataclass

import torch

from engines.algorithms.aggregation import token_mean
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch


@dataclass(frozen=True)
class ValueObjective:
    """A critic's loss function: (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    ``1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, a mean over trained tokens: the
    clipped form of PPO2 (Schulman et al., openai/baselines; arXiv:2005.12729 sec. 3 examines it).
    The maximum has no gradient where V moved further than c, and towards R. c is `cliprange`; None
    does not clip.
    """

    cliprange: float | None = None

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics.

        Reads the columns `loss_mask`, `returns` and, to clip, `values`.

        Raises:
            ValueError: the outputs are of a language model.
        """
        values_T = outputs.values_T
        if values_T is None:
            raise ValueError("a value loss needs a value model: the forward pass has no values")
        mask_T, returns_T = batch.columns["loss_mask"] > 0, batch.columns["returns"]
        loss_T = (values_T - returns_T).square()
        clipped_T = torch.zeros_like(values_T)
        if self.cliprange is not None:
            before_T = batch.columns["values"]
            near_T = values_T.clamp(before_T - self.cliprange, before_T + self.cliprange)
            other_T = (near_T - returns_T).square()
            clipped_T = (other_T > loss_T).float()
            loss_T = torch.maximum(loss_T, other_T)
        loss = token_mean(0.5 * loss_T, mask_T, counts)
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": token_mean(clipped_T, mask_T, counts),
            "critic/vpred_mean": token_mean(values_T.detach(), mask_T, counts),
        }
        return LossOutput(loss, metrics)
