"""The loss of an update with a teacher: the teacher's loss plus the policy loss, in one forward."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engines.algorithms.aggregation import token_mean
from engines.algorithms.distillation.losses import SampledDistillation, TopKDistillation
from engines.algorithms.parts import Gather
from engines.algorithms.policy_objective import PolicyObjective, policy_loss_fn
from engines.config.distillation import TOPK
from engines.config.sections import RLConfig
from engines.types import GlobalCounts, LossOutput, ModelOutputs, Readouts, TokenBatch


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
        """Return this micro-batch's share of both; raises as they do."""
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
    policy = policy_loss_fn(rl.algorithm, rl.sampling.max_new_tokens)
    section = rl.distillation
    if section is None:
        return policy
    scale = rl.algorithm.loss_scale_factor or float(rl.sampling.max_new_tokens)
    teacher: TopKDistillation | SampledDistillation
    if section.loss == TOPK:
        teacher = TopKDistillation(
            tail=section.tail,
            loss_max_clamp=section.loss_max_clamp,
            loss_agg_mode=rl.algorithm.loss_agg_mode,
            scale_factor=scale,
        )
    else:
        teacher = SampledDistillation(
            section.loss, section.loss_max_clamp, rl.algorithm.loss_agg_mode, scale
        )
    return DistilledObjective(teacher, policy, section.weight, section.policy_weight)
