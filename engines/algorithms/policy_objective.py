"""The loss function of one RL update: policy loss - entropy bonus + KL to the reference + NLL.

Promises: every term is aggregated with the same mode over global counts; metrics are shares that
add up over micro-batches and ranks. Without a column `old_logprobs` the batch counts as on-policy
(one update per batch): the ratio is 1 and its gradient is that of REINFORCE.
Advantages, reference logprobs and scores are columns made beforehand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engines.algorithms.aggregation import aggregate, masked_sum, token_mean
from engines.algorithms.kl import kl_estimate
from engines.algorithms.parts import (
    Gather,
    PolicyLossInputs,
    PrepassInputs,
    TokenLoss,
    find_part,
)
from engines.config.algorithm import AlgorithmConfig
from engines.config.rows.algorithm import POLICY_LOSSES
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch

_NUM_POSITIVE = "num_positive_tokens"


@dataclass(frozen=True)
class PolicyObjective:
    """A loss function (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    Plain data, so that it can be sent to other processes; functions are looked up by name there.
    `max_new_tokens` is the default divisor of `seq-mean-token-sum-norm`.
    """

    algorithm: AlgorithmConfig
    max_new_tokens: int

    @property
    def readouts(self) -> Readouts:
        """Entropy in every step, which reveals a failing run; with gradient only if rewarded."""
        return Readouts(entropy=True, entropy_gradient=bool(self.algorithm.entropy_coeff))

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that the batch must have."""
        row = find_part(POLICY_LOSSES, self.algorithm.loss_mode).row
        reference = {"ref_logprobs"} if self.algorithm.use_kl_loss else set()
        positive = {"positive"} if self.algorithm.positive_nll_coef else set()
        return frozenset({*row.columns, "loss_mask", *reference, *positive})

    def extras(self, batch: TokenBatch, gather: Gather) -> Mapping[str, float]:
        """Return the numbers of the whole step that the policy loss needs; see `LossFn`."""
        part = find_part(POLICY_LOSSES, self.algorithm.loss_mode)
        mask_T, found = batch.columns["loss_mask"] > 0, {}
        if part.prepass is not None:
            options = part.options(self.algorithm)
            found = {**part.prepass(PrepassInputs(batch, mask_T, gather, options))}
        if self.algorithm.positive_nll_coef:
            own = (batch.columns["positive"] * mask_T).sum().reshape(1)
            found[_NUM_POSITIVE] = float(gather(own).sum())
        return found

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics of the step."""
        missing = sorted(self.required_columns - batch.columns.keys())
        if missing:
            raise ValueError(
                f"loss {self.algorithm.loss_mode} needs the columns {missing}; the batch has "
                f"{sorted(batch.columns)}"
            )
        mask_T = batch.columns["loss_mask"] > 0
        old_logprobs_T = batch.columns.get("old_logprobs", outputs.logprobs_T.detach())
        policy = self._policy_loss(outputs, old_logprobs_T, mask_T, batch, counts)
        loss = self._aggregate(policy.loss_T, mask_T, batch, counts)
        metrics = {"actor/pg_loss": loss.detach()}
        for name, values_T in policy.token_metrics.items():
            metrics[name] = token_mean(values_T.detach(), mask_T, counts)
        if outputs.entropy_T is not None:
            metrics["actor/entropy"] = token_mean(outputs.entropy_T.detach(), mask_T, counts)
        if self.algorithm.entropy_coeff:
            loss = loss - self._entropy_bonus(outputs, mask_T, batch, counts)
        if self.algorithm.positive_nll_coef:
            nll = self._positive_nll(outputs, mask_T, batch, counts)
            metrics["actor/positive_nll"] = nll.detach()
            loss = loss + self.algorithm.positive_nll_coef * nll
        if self.algorithm.use_kl_loss:
            kl = self._aggregate(self._kl_T(outputs, batch), mask_T, batch, counts)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + self.algorithm.kl_loss_coef * kl
        return LossOutput(loss, metrics)

    def _policy_loss(
        self,
        outputs: ModelOutputs,
        old_logprobs_T: Tensor,
        mask_T: Tensor,
        batch: TokenBatch,
        counts: GlobalCounts,
    ) -> TokenLoss:
        part = find_part(POLICY_LOSSES, self.algorithm.loss_mode)
        return part.function(
            PolicyLossInputs(
                logprobs_T=outputs.logprobs_T,
                old_logprobs_T=old_logprobs_T,
                advantages_T=batch.columns["advantages"],
                mask_T=mask_T,
                batch=batch,
                counts=counts,
                algorithm=self.algorithm,
                options=part.options(self.algorithm),
            )
        )

    def _entropy_bonus(
        self, outputs: ModelOutputs, mask_T: Tensor, batch: TokenBatch, counts: GlobalCounts
    ) -> Tensor:
        if outputs.entropy_T is None:
            raise ValueError("entropy_coeff is set but the forward pass returned no entropy")
        entropy = self._aggregate(outputs.entropy_T, mask_T, batch, counts)
        return self.algorithm.entropy_coeff * entropy

    def _positive_nll(
        self, outputs: ModelOutputs, mask_T: Tensor, batch: TokenBatch, counts: GlobalCounts
    ) -> Tensor:
        """Return the mean over the tokens of right answers of the step (VAPO, arXiv:2504.05118)."""
        positive_T = mask_T & (batch.columns["positive"] > 0)
        num_positive = max(counts.extras[_NUM_POSITIVE], 1.0)
        return masked_sum(-outputs.logprobs_T, positive_T) / num_positive

    def _kl_T(self, outputs: ModelOutputs, batch: TokenBatch) -> Tensor:
        return kl_estimate(
            self.algorithm.kl_loss_type,
            outputs.logprobs_T,
            batch.columns["ref_logprobs"],
        )

    def _aggregate(
        self, values_T: Tensor, mask_T: Tensor, batch: TokenBatch, counts: GlobalCounts
    ) -> Tensor:
        scale = self.algorithm.loss_scale_factor or float(self.max_new_tokens)
        return aggregate(values_T, mask_T, batch, counts, self.algorithm.loss_agg_mode, scale)


def policy_loss_fn(algorithm: AlgorithmConfig, max_new_tokens: int) -> PolicyObjective:
    """Return the loss function of the configured algorithm."""
    return PolicyObjective(algorithm, max_new_tokens)
