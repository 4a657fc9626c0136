"""What one step of a stage computes: which models, on how many tokens, in which layout.

Promises: the models of a stage are those that its job loads. Lengths are the recipe's limits
wherever only data would tell them, so bytes and seconds are upper bounds; `notes` say so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from engines.config.model import adapter_travels
from engines.config.rollout import RolloutConfig
from engines.config.rows import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from engines.config.sections import PairsConfig, RLConfig
from engines.config.stages.base import StageConfig, TrainingStageConfig
from engines.config.stages.final import AGAINST, EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig, ServingStageConfig
from engines.config.stages.supervised import RewardModelStageConfig
from engines.config.training import LoraConfig, TrainingConfig
from engines.cost.model_shape import ModelShape

Role = Literal["policy", "critic", "reference", "reward", "teacher"]
ShapeOf = Callable[[str, bool], ModelShape]
"""Returns the shape of the model that a recipe setting (`model.path`) names; True: with a value
head."""

_MODEL, _REWARD, _TEACHER = "model.path", "rl.reward.model.path", "rl.distillation.path"
_REFERENCE_LOSSES = frozenset({"sigmoid", "ipo", "kto"})
"""Preference losses that compare with a reference model."""


@dataclass(frozen=True)
class RoleCost:
    """A model on the training ranks.

    Attributes:
        lora: adapter that is trained instead of the weights.
        num_passes: forward passes of a step without gradients, over all its tokens.
        num_trained: passes of a step with gradients; 0 for a frozen model.
    """

    role: Role
    shape: ModelShape
    num_passes: int = 0
    num_trained: int = 0
    lora: LoraConfig | None = None
    keeps_average: bool = False

    @property
    def num_trained_parameters(self) -> int:
        """Weights with gradients."""
        adapter = self.lora and self.shape.adapter_parameters(self.lora)
        return (adapter or self.shape.num_parameters) if self.num_trained else 0


@dataclass(frozen=True)
class SampledWork:
    """A model that engines sample from, with weights and cache of a dtype.

    `num_sequences` are a step's, over all engines; None if only data tells. A sync sends
    `sync_parameters` numbers; 0 if weights are loaded once.
    """

    shape: ModelShape
    rollout: RolloutConfig
    dtype: str
    prompt_tokens: int
    answer_tokens: int
    num_sequences: int | None
    sync_parameters: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed, in words."""
        lengths = (
            f"every prompt has {self.prompt_tokens} tokens (data.max_prompt_length), every answer "
            f"{self.answer_tokens} (its limit)"
        )
        unknown = "the number of problems is that of the data: no seconds"
        return (lengths, *(() if self.num_sequences else (unknown,)), *self.shape.uncounted)


@dataclass(frozen=True)
class Workload:
    """One step of a stage.

    Attributes:
        roles: models on the training ranks, the first one is trained; empty if nothing trains.
        training: layout of the ranks.
        num_sequences: trained on in a step, over all ranks.
        sequence_tokens: length of the longest sequence; `unit_tokens` of what no micro-batch cuts.
        num_updates: optimizer steps of one step of the stage and of one pass over its tokens.
        notes: what is assumed, in words.
    """

    roles: tuple[RoleCost, ...] = ()
    training: TrainingConfig = field(default_factory=TrainingConfig)
    num_sequences: int = 0
    sequence_tokens: int = 0
    unit_tokens: int = 0
    num_updates: int = 1
    sampled: SampledWork | None = None
    notes: tuple[str, ...] = ()


def workload_of(stage: StageConfig, prompt_tokens: int, shape_of: ShapeOf) -> Workload | None:
    """Return what a step of a stage computes; None if it uses no device. Raises as `shape_of`."""
    if isinstance(stage, RLRoundStageConfig):
        return _rl_round(stage, prompt_tokens, shape_of)
    if isinstance(stage, TrainingStageConfig):
        return _supervised(stage, shape_of)
    if isinstance(stage, EvaluateStageConfig):
        asked = stage.evaluation
        count = asked.num_problems and asked.num_problems * (1 + asked.num_samples)
        shape = shape_of("against.path" if stage.model_section == AGAINST else _MODEL, False)
        return _served(stage, shape, prompt_tokens, asked.answer_length, count)
    if isinstance(stage, SelfPlayStageConfig):
        play, answer = stage.self_play, stage.sampling.max_new_tokens
        count = play.num_prompts and play.num_prompts * play.samples_per_prompt
        return _served(stage, shape_of(_MODEL, False), prompt_tokens, answer, count)
    return None


def _supervised(stage: TrainingStageConfig, shape_of: ShapeOf) -> Workload:
    """Return a stage whose section has its name."""
    section, training, length = getattr(stage, stage.stage), stage.training, stage.model.max_length
    shape = shape_of(_MODEL, isinstance(stage, RewardModelStageConfig))
    policy = RoleCost("policy", shape, 0, 1, training.lora, section.optimizer.ema is not None)
    num_sequences, unit, loss = getattr(section, "batch_size_sequences", 0), length, None
    if isinstance(section, PairsConfig):
        num_sequences, loss = 2 * section.batch_size_pairs, getattr(section, "loss", None)
        unit *= 2 if loss is None or PREFERENCE_LOSSES.find(loss).paired else 1
    return Workload(
        roles=_with_reference(policy) if loss in _REFERENCE_LOSSES else (policy,),
        training=training,
        num_sequences=num_sequences,
        sequence_tokens=length,
        unit_tokens=unit,
        notes=(f"every sequence has {length} tokens (model.max_length)", *shape.uncounted),
    )


def _rl_round(stage: RLRoundStageConfig, prompt_tokens: int, shape_of: ShapeOf) -> Workload:
    rl, training, rollout = stage.rl, stage.training, stage.rollout
    roles = tuple(_rl_roles(rl, training, shape_of))
    shape, answer = roles[0].shape, rl.sampling.max_new_tokens
    lora = training.lora if adapter_travels(training, rollout) else None
    sent = shape.adapter_parameters(lora) if lora else shape.num_parameters
    count, dtype = rl.batch_size_prompts * rl.group_size, rollout.dtype or training.dtype
    sampled = SampledWork(shape, rollout, dtype, prompt_tokens, answer, count, sent)
    return Workload(
        roles=roles,
        training=training,
        num_sequences=count,
        sequence_tokens=prompt_tokens + answer,
        unit_tokens=prompt_tokens + answer,
        num_updates=rl.batch_size_prompts // rl.prompts_per_update,
        sampled=sampled,
        notes=sampled.notes,
    )


def _rl_roles(rl: RLConfig, training: TrainingConfig, shape_of: ShapeOf) -> Iterator[RoleCost]:
    """Yield the roles of `engines.jobs.rl_round`."""
    parts, critic, teacher = rl.algorithm, rl.critic, rl.distillation
    columns = (
        *ADVANTAGES.find(parts.adv_estimator).columns,
        *POLICY_LOSSES.find(parts.loss_mode).columns,
    )
    is_repeated = rl.num_epochs > 1 or rl.prompts_per_update < rl.batch_size_prompts
    reads_old = is_repeated or parts.use_kl_in_reward or "old_logprobs" in columns
    shape, ema = shape_of(_MODEL, False), rl.optimizer.ema is not None
    policy = RoleCost("policy", shape, int(reads_old), rl.num_epochs, training.lora, ema)
    policy, *reference = _with_reference(policy) if parts.needs_reference else (policy,)
    yield policy
    if critic is not None:
        shape = shape_of(_REWARD if critic.start == "reward_model" else _MODEL, True)
        num_epochs, ema = critic.num_epochs or rl.num_epochs, critic.optimizer.ema is not None
        yield RoleCost("critic", shape, 1, num_epochs, None, ema)
    yield from reference
    if rl.reward.model is not None:
        yield RoleCost("reward", shape_of(_REWARD, True), num_passes=1)
    if teacher is not None and teacher.served is None:
        yield RoleCost("teacher", shape_of(_TEACHER, False), num_passes=1)


def _with_reference(policy: RoleCost) -> tuple[RoleCost, ...]:
    """Add the reference; a policy with an adapter computes it, without the adapter."""
    if policy.lora:
        return (replace(policy, num_passes=policy.num_passes + 1),)
    return policy, RoleCost("reference", policy.shape, num_passes=1)


def _served(
    stage: ServingStageConfig, shape: ModelShape, prompt_tokens: int, answer: int, count: int | None
) -> Workload:
    dtype = stage.rollout.dtype or stage.dtype
    sampled = SampledWork(shape, stage.rollout, dtype, prompt_tokens, answer, count)
    return Workload(sampled=sampled, notes=sampled.notes)
