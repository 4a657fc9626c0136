"""On-policy distillation: a student learns a teacher's distributions on its own samples.

GKD (arXiv:2306.13649). The loss of a token is KL(teacher || student) over the teacher's K most
likely tokens, or an estimate of KL(student || teacher) from the sampled token alone.
`policy_objective` adds the policy loss in the same forward pass.

Promises: a micro-batch's share of the step's loss and metrics, independent of how the step is cut.
With `bucket`, a student whose logprobs equal its teacher's has exactly loss 0 and gradient 0.
Letters: T tokens, K most likely tokens of the teacher.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engines.algorithms.aggregation import aggregate, token_mean
from engines.algorithms.kl import kl_estimate
from engines.config.algorithm import LossAggMode
from engines.types import (
    ONLY_LOGPROBS,
    GlobalCounts,
    LossOutput,
    ModelOutputs,
    Readouts,
    TokenBatch,
)

TOPK_IDS, TOPK_LOGPROBS, SAMPLED_LOGPROBS = (
    "teacher_topk_ids", "teacher_topk_logprobs", "teacher_logprobs",
)  # fmt: skip
"""Columns: (T, K) int64 and (T, K) of the teacher's likeliest tokens, (T,) of the sampled ones."""

OF_TEACHERS_TOKENS = Readouts(logprobs_of=TOPK_IDS)

Tail = Literal["bucket", "renormalise", "ignore"]
"""Treatment of the tokens outside the teacher's K most likely; see `forward_kl_topk`."""

TAIL_MASS_EPS = 1e-5
"""Minimum of the rest: in float32, 1 minus a sum of probabilities is right to about 1e-6."""


def forward_kl_topk(
    logprobs_TK: Tensor,
    teacher_logprobs_TK: Tensor,
    *,
    tail: Tail = "bucket",
    tail_mass_eps: float = TAIL_MASS_EPS,
) -> Tensor:
    """Return KL(teacher || student) of each token over the teacher's K most likely, (T,) in nats.

    With p the teacher's and q the student's probabilities of these K, P and Q their sums:

    - `bucket`: ``sum p log(p / q) + (1 - P) log((1 - P) / (1 - Q))``: all others are one token,
      the rest. Up to `tail_mass_eps` it is a KL: not negative, 0 only if q = p, at most the KL
      over the whole vocabulary (grouping tokens loses information), and equal to it at K = V.
    - `renormalise`: ``sum p/P log((p / P) / (q / Q))``: also a KL, of the distributions given that
      the token is one of the K. It does not depend on Q: a student may move all its mass elsewhere.
    - `ignore`: ``sum p log(p / q)``. It can be negative where Q > P, and is least at q = p / P: it
      teaches a sharper distribution than the teacher's (the bias of top-k, arXiv:2503.16870), and
      has a gradient where student and teacher are equal.

    Hence the default. In `bucket` a rest (1 - P or 1 - Q) below `tail_mass_eps` counts as that
    size; the student's keeps the gradient (1 - P) / `tail_mass_eps` times that of Q, which a clamp
    would remove.

    Args:
        logprobs_TK: (T, K) of the student, with gradient.
        teacher_logprobs_TK: (T, K) of the teacher for the same tokens, distinct in each row; -inf
            is probability 0.
        tail_mass_eps: minimum of 1 - P and 1 - Q; for `bucket`.
    """
    if tail == "renormalise":
        logprobs_TK = logprobs_TK.log_softmax(dim=1)
        teacher_logprobs_TK = teacher_logprobs_TK.log_softmax(dim=1)
    p_TK = teacher_logprobs_TK.exp()
    # 0 log 0 is 0, not 0 * -inf.
    kl_T = torch.where(p_TK > 0, p_TK * (teacher_logprobs_TK - logprobs_TK), 0.0).sum(dim=1)
    if tail != "bucket":
        return kl_T
    mass_T = logprobs_TK.exp().sum(dim=1)
    rest_T = (1.0 - mass_T.detach()).clamp(min=tail_mass_eps)
    teacher_rest_T = (1.0 - p_TK.sum(dim=1)).clamp(min=tail_mass_eps)
    value_T = teacher_rest_T * (teacher_rest_T.log() - rest_T.log())
    # Its gradient, (1 - P) / (1 - Q) times that of Q, written out: if student and teacher are
    # equal the quotient is 1, and the whole gradient is exactly 0.
    return kl_T + value_T + (teacher_rest_T / rest_T) * (mass_T - mass_T.detach())


@dataclass(frozen=True, kw_only=True)
class _TeacherLoss:
    """Base of both losses; clamps a token's loss to +-`loss_max_clamp` (None: no clamp)."""

    loss_max_clamp: float | None = None
    loss_agg_mode: LossAggMode = "token-mean"
    scale_factor: float = 1.0

    def _aggregated(self, kl_T: Tensor, batch: TokenBatch, counts: GlobalCounts) -> Tensor:
        if self.loss_max_clamp is not None:
            kl_T = kl_T.clamp(-self.loss_max_clamp, self.loss_max_clamp)
        mask_T = batch.columns["loss_mask"] > 0
        return aggregate(kl_T, mask_T, batch, counts, self.loss_agg_mode, self.scale_factor)


@dataclass(frozen=True)
class TopKDistillation(_TeacherLoss):
    """Loss of a step: KL(teacher || student) over the teacher's K most likely tokens."""

    tail: Tail = "bucket"
    readouts: Readouts = OF_TEACHERS_TOKENS

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss and of the metrics.

        The metrics are `distillation/loss` and the mass of the K tokens, `teacher_mass` and
        `student_mass`. Columns of `batch`: `loss_mask`, `teacher_topk_ids`, (T, K) int64, and
        `teacher_topk_logprobs`, (T, K), finite also on tokens that are not trained on.

        Raises:
            ValueError: the student's logprobs are absent or do not have the teacher's shape.
        """
        teacher_TK, logprobs_TK = batch.columns[TOPK_LOGPROBS], outputs.topk_logprobs_TK
        if logprobs_TK is None:
            raise ValueError(f"outputs: got no logprobs of the tokens {TOPK_IDS}; ask for them")
        if logprobs_TK.shape != teacher_TK.shape:
            raise ValueError(
                f"logprobs of the teacher's tokens: got {tuple(logprobs_TK.shape)}; need "
                f"{tuple(teacher_TK.shape)}"
            )
        kl_T = forward_kl_topk(logprobs_TK, teacher_TK, tail=self.tail)
        loss, mask_T = self._aggregated(kl_T, batch, counts), batch.columns["loss_mask"] > 0
        metrics = {"distillation/loss": loss.detach()}
        for name, of_TK in (("teacher", teacher_TK), ("student", logprobs_TK.detach())):
            mass_T = of_TK.exp().sum(dim=1)
            metrics[f"distillation/{name}_mass"] = token_mean(mass_T, mask_T, counts)
        return LossOutput(loss, metrics)


@dataclass(frozen=True)
class SampledDistillation(_TeacherLoss):
    """Loss of a step: an estimate of KL(student || teacher) from the sampled tokens.

    Only for samples of the current student: they are not reweighted for an older one. With `k2` or
    an `estimator` that ends in `+`, the expected gradient is that of this KL. That of `k1` is 0;
    that of `k3` is the gradient of KL(teacher || student), except where `k3` continues as a line.
    """

    estimator: str = "k3+"
    readouts: Readouts = ONLY_LOGPROBS

    def __call__(
        self, outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts
    ) -> LossOutput:
        """Return this micro-batch's share of the loss, and of the metric `distillation/loss`.

        Raises:
            UnknownPluginError: there is no such estimator.
        """
        kl_T = kl_estimate(self.estimator, outputs.logprobs_T, batch.columns[SAMPLED_LOGPROBS])
        loss = self._aggregated(kl_T, batch, counts)
        return LossOutput(loss, {"distillation/loss": loss.detach()})
