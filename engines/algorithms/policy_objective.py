"""The loss functions of an RL update, of the policy and of the critic.

For the policy: policy loss - entropy bonus + KL to the reference + NLL; a teacher's loss is added
to it, or takes its place. For the critic: the squared error, clipped around the old values.
Advantages, returns, reference logprobs and scores are columns made beforehand. With PF-PPO
(arXiv:2409.06957) the answers of each prompt are resampled before the update, weighted by their
rewards, because a reward model is most reliable where it is most certain.

Promises: every term is aggregated with the same mode over global counts, except that values are a
mean over trained tokens and the NLL one over those of right answers; metrics are shares that add up
over micro-batches and ranks. Without a column `old_logprobs` the batch counts as on-policy (one
update per batch): the ratio is 1 and its gradient is that of REINFORCE. When answers are resampled,
a prompt keeps its number of answers, a sample its advantage; the seed gives all random numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.algorithms.aggregation import aggregate, masked_sum, token_mean
from engines.algorithms.distillation import SampledDistillation, TopKDistillation
from engines.algorithms.kl import kl_estimate
from engines.algorithms.parts import (
    Gather,
    PolicyLossInputs,
    PrepassInputs,
    check_batch,
    find_part,
)
from engines.config.algorithm import TOPK, AlgorithmConfig, PfPpoConfig
from engines.config.base import StrictModel
from engines.config.rows import POLICY_LOSSES
from engines.config.sections import RLConfig
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch

_NUM_POSITIVE = "num_positive_tokens"


@dataclass(frozen=True)
class PolicyObjective:
    """A policy's loss function: (`ModelOutputs`, `TokenBatch`, `GlobalCounts`) -> `LossOutput`.

    Plain data, so that it can be sent to other processes; functions are looked up by name there.

    Attributes:
        max_new_tokens: default divisor of `seq-mean-token-sum-norm`.
        options: the policy loss's share of `algorithm.options`, validated.
    """

    algorithm: AlgorithmConfig
    max_new_tokens: int
    options: StrictModel

    @property
    def readouts(self) -> Readouts:
        """Entropy in every step, to show a failing run; with gradient only for an entropy bonus."""
        return Readouts(entropy=True, entropy_gradient=bool(self.algorithm.entropy_coeff))

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that the batch must have."""
        row, algorithm = find_part(POLICY_LOSSES, self.algorithm.loss_mode).row, self.algorithm
        reference = {"ref_logprobs"} if algorithm.use_kl_loss else set()
        positive = {"positive"} if algorithm.positive_nll_coef else set()
        return frozenset({*row.columns, "loss_mask", *reference, *positive})

    def extras(self, batch: TokenBatch, gather: Gather) -> Mapping[str, float]:
        """Return statistics of the whole step that the policy loss needs; see `LossFn`."""
        part = find_part(POLICY_LOSSES, self.algorithm.loss_mode)
        mask_T, found = batch.columns["loss_mask"] > 0, dict[str, float]()
        if part.prepass is not None:
            found |= part.prepass(PrepassInputs(batch, mask_T, gather, self.options))
        if self.algorithm.positive_nll_coef:
            own = (batch.columns["positive"] * mask_T).sum().reshape(1)
            found[_NUM_POSITIVE] = float(gather(own).sum())
        return found

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and metrics of the step."""
        check_batch(f"loss {self.algorithm.loss_mode}", batch, self.required_columns)
        algorithm, mask_T = self.algorithm, batch.columns["loss_mask"] > 0
        part = find_part(POLICY_LOSSES, algorithm.loss_mode)
        policy = part.function(
            PolicyLossInputs(
                logprobs_T=outputs.logprobs_T,
                old_logprobs_T=batch.columns.get("old_logprobs", outputs.logprobs_T.detach()),
                advantages_T=batch.columns["advantages"],
                mask_T=mask_T,
                batch=batch,
                counts=counts,
                algorithm=algorithm,
                options=self.options,
            )
        )
        loss = self._aggregate(policy.loss_T, mask_T, batch, counts)
        metrics = {"actor/pg_loss": loss.detach()}
        for name, values_T in policy.token_metrics.items():
            metrics[name] = token_mean(values_T.detach(), mask_T, counts)
        if outputs.entropy_T is not None:
            metrics["actor/entropy"] = token_mean(outputs.entropy_T.detach(), mask_T, counts)
        if algorithm.entropy_coeff:
            if outputs.entropy_T is None:
                raise ValueError("entropy_coeff is set but the forward pass returned no entropy")
            loss = loss - algorithm.entropy_coeff * self._aggregate(
                outputs.entropy_T, mask_T, batch, counts
            )
        if algorithm.positive_nll_coef:
            # A mean over the tokens of right answers of the step (VAPO, arXiv:2504.05118).
            positive_T = mask_T & (batch.columns["positive"] > 0)
            num_positive = max(counts.extras[_NUM_POSITIVE], 1.0)
            nll = masked_sum(-outputs.logprobs_T, positive_T) / num_positive
            metrics["actor/positive_nll"] = nll.detach()
            loss = loss + algorithm.positive_nll_coef * nll
        if algorithm.use_kl_loss:
            kl_T = kl_estimate(
                algorithm.kl_loss_type, outputs.logprobs_T, batch.columns["ref_logprobs"]
            )
            kl = self._aggregate(kl_T, mask_T, batch, counts)
            metrics["actor/kl_loss"] = kl.detach()
            loss = loss + algorithm.kl_loss_coef * kl
        return LossOutput(loss, metrics)

    def _aggregate(
        self, values_T: Tensor, mask_T: Tensor, batch: TokenBatch, counts: GlobalCounts
    ) -> Tensor:
        scale = self.algorithm.loss_scale_factor or float(self.max_new_tokens)
        return aggregate(values_T, mask_T, batch, counts, self.algorithm.loss_agg_mode, scale)


def policy_loss_fn(algorithm: AlgorithmConfig, max_new_tokens: int) -> PolicyObjective:
    """Return the loss function of the configured algorithm; raises as `find_part` does."""
    options = find_part(POLICY_LOSSES, algorithm.loss_mode).options(algorithm)
    return PolicyObjective(algorithm, max_new_tokens, options)


@dataclass(frozen=True)
class DistilledObjective:
    """A loss function, as `PolicyObjective`: ``weight * teacher + policy_weight * policy``.

    Attributes:
        policy_weight: at 0 the policy loss is not computed; only the entropy is measured.
    """

    teacher: TopKDistillation | SampledDistillation
    policy: PolicyObjective
    weight: float
    policy_weight: float

    @property
    def readouts(self) -> Readouts:
        """Readouts of both losses."""
        return replace(self.policy.readouts, logprobs_of=self.teacher.readouts.logprobs_of)

    def extras(self, batch: TokenBatch, gather: Gather) -> Mapping[str, float]:
        """Return the policy loss's extras, if it has a weight."""
        return self.policy.extras(batch, gather) if self.policy_weight else {}

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the weighted losses; raises as they do."""
        taught = self.teacher(outputs, batch, counts)
        loss, metrics = self.weight * taught.loss, {**taught.metrics}
        if self.policy_weight:
            own = self.policy(outputs, batch, counts)
            return LossOutput(loss + self.policy_weight * own.loss, metrics | {**own.metrics})
        if outputs.entropy_T is not None:
            mask_T = batch.columns["loss_mask"] > 0
            metrics["actor/entropy"] = token_mean(outputs.entropy_T.detach(), mask_T, counts)
        return LossOutput(loss, metrics)


Objective = PolicyObjective | DistilledObjective


def round_loss_fn(rl: RLConfig) -> Objective:
    """Return the loss function of a round's policy, with the teacher's if there is one."""
    policy, section = policy_loss_fn(rl.algorithm, rl.sampling.max_new_tokens), rl.distillation
    if section is None:
        return policy
    is_topk = section.loss == TOPK
    loss = TopKDistillation(section.tail) if is_topk else SampledDistillation(section.loss)
    teacher = replace(
        loss,
        loss_max_clamp=section.loss_max_clamp,
        loss_agg_mode=rl.algorithm.loss_agg_mode,
        scale_factor=rl.algorithm.loss_scale_factor or float(rl.sampling.max_new_tokens),
    )
    return DistilledObjective(teacher, policy, section.weight, section.policy_weight)


_RANDOM_MAX, _RANDOM_REST = 0.4, 0.1
"""Weights of `max_random`."""


def resampling_weights(rewards_B: Tensor, index_B: Tensor, config: PfPpoConfig) -> Tensor:
    """Return (B,) float64 >= 0, unnormalised weights of the answers to each prompt `index_B`.

    `pow`: ``|R| ** weight_pow``; `max_min`: 1 for the largest and the smallest reward of a prompt,
    else 0; `max_random`: 0.4 for the largest, else 0.1.
    """
    rewards_B, index_B = rewards_B.to(torch.float64), _dense(index_B)
    if config.reweight_method == "pow":
        return rewards_B.abs() ** config.weight_pow
    is_max_B = rewards_B == _extreme_B(rewards_B, index_B, "amax")
    if config.reweight_method == "max_min":
        return (is_max_B | (rewards_B == _extreme_B(rewards_B, index_B, "amin"))).to(torch.float64)
    return torch.full_like(rewards_B, _RANDOM_REST).masked_fill(is_max_B, _RANDOM_MAX)


def resample(rewards_B: Tensor, index_B: Tensor, config: PfPpoConfig, seed: int) -> Tensor:
    """Return the samples that a step trains on, (B,) int64 indices, ascending, with repetitions.

    Each prompt keeps its number of answers; if all their weights are 0, each is taken once.
    """
    weights_B = resampling_weights(rewards_B, index_B, config)
    draws_B = torch.rand(
        rewards_B.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    chosen_B = torch.arange(rewards_B.numel())
    index_B = _dense(index_B)
    for places_G in index_B.argsort(stable=True).split(index_B.bincount().tolist()):
        # Inverse of the cumulative weights: draws are independent.
        ends_G = weights_B[places_G].cumsum(0)
        if float(ends_G[-1]) > 0:
            last = int(weights_B[places_G].nonzero().max())
            found_G = torch.searchsorted(ends_G, draws_B[places_G] * ends_G[-1], right=True)
            chosen_B[places_G] = places_G[found_G.clamp(max=last)]
    return chosen_B.sort().values


def _dense(index_B: Tensor) -> Tensor:
    """Number prompts from 0 without gaps: some may have been left out of the step."""
    return index_B.unique(return_inverse=True)[1]


def _extreme_B(rewards_B: Tensor, index_B: Tensor, which: str) -> Tensor:
    """Return (B,) the largest or smallest reward of each sample's prompt."""
    zeros_P = rewards_B.new_zeros(int(index_B.max()) + 1 if index_B.numel() else 0)
    return zeros_P.scatter_reduce(0, index_B, rewards_B, which, include_self=False)[index_B]


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
