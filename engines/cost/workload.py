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
        if not self.num_trained:
            return 0
        shape = self.shape
        return shape.adapter_parameters(self.lora) if self.lora else shape.num_parameters


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
        asked, num_samples = stage.evaluation, 1 + stage.evaluation.num_samples
        count = asked.num_problems and asked.num_problems * num_samples
        return _served(stage, prompt_tokens, asked.answer_length, count, shape_of)
    if isinstance(stage, SelfPlayStageConfig):
        play, answer = stage.self_play, stage.sampling.max_new_tokens
        count = play.num_prompts and play.num_prompts * play.samples_per_prompt
        return _served(stage, prompt_tokens, answer, count, shape_of)
    return None


def _supervised(stage: TrainingStageConfig, shape_of: ShapeOf) -> Workload:
    """Return a stage whose section has its name."""
    section, training, length = getattr(stage, stage.stage), stage.training, stage.model.max_length
    shape = shape_of(_MODEL, isinstance(stage, RewardModelStageConfig))
    ema = section.optimizer.ema is not None
    roles = [RoleCost("policy", shape, 0, 1, training.lora, ema)]
    num_sequences, unit = getattr(section, "batch_size_sequences", 0), length
    if isinstance(section, PairsConfig):
        num_sequences = 2 * section.batch_size_pairs
        loss = getattr(section, "loss", None)
        unit *= 2 if loss is None or PREFERENCE_LOSSES.find(loss).paired else 1
        if loss in _REFERENCE_LOSSES:
            roles.append(RoleCost("reference", shape, num_passes=1))
    return Workload(
        roles=_without_own_reference(roles),
        training=training,
        num_sequences=num_sequences,
        sequence_tokens=length,
        unit_tokens=unit,
        notes=(f"every sequence has {length} tokens (model.max_length)", *shape.uncounted),
    )


def _rl_round(stage: RLRoundStageConfig, prompt_tokens: int, shape_of: ShapeOf) -> Workload:
    rl, training, rollout = stage.rl, stage.training, stage.rollout
    shape, answer = shape_of(_MODEL, False), rl.sampling.max_new_tokens
    sent = shape.num_parameters
    if training.lora and adapter_travels(training, rollout):
        sent = shape.adapter_parameters(training.lora)
    count = rl.batch_size_prompts * rl.group_size
    dtype = rollout.dtype or training.dtype
    return Workload(
        roles=_without_own_reference([*_rl_roles(rl, training, shape, shape_of)]),
        training=training,
        num_sequences=count,
        sequence_tokens=prompt_tokens + answer,
        unit_tokens=prompt_tokens + answer,
        num_updates=rl.batch_size_prompts // rl.prompts_per_update,
        sampled=SampledWork(shape, rollout, dtype, prompt_tokens, answer, count, sent),
        notes=(_lengths(prompt_tokens, answer), *shape.uncounted),
    )


def _rl_roles(
    rl: RLConfig, training: TrainingConfig, shape: ModelShape, shape_of: ShapeOf
) -> Iterator[RoleCost]:
    """Yield the roles of `engines.jobs.rl_round`."""
    parts = rl.algorithm
    estimator, loss = ADVANTAGES.find(parts.adv_estimator), POLICY_LOSSES.find(parts.loss_mode)
    is_repeated = rl.num_epochs > 1 or rl.prompts_per_update < rl.batch_size_prompts
    reads_old = is_repeated or parts.use_kl_in_reward
    reads_old |= "old_logprobs" in (*estimator.columns, *loss.columns)
    ema = rl.optimizer.ema is not None
    yield RoleCost("policy", shape, int(reads_old), rl.num_epochs, training.lora, ema)
    if rl.critic is not None:
        start = _REWARD if rl.critic.start == "reward_model" else _MODEL
        epochs, ema = rl.critic.num_epochs or rl.num_epochs, rl.critic.optimizer.ema is not None
        yield RoleCost("critic", shape_of(start, True), 1, epochs, None, ema)
    if parts.needs_reference:
        yield RoleCost("reference", shape, num_passes=1)
    if rl.reward.model is not None:
        yield RoleCost("reward", shape_of(_REWARD, True), num_passes=1)
    if rl.distillation is not None and rl.distillation.served is None:
        yield RoleCost("teacher", shape_of(_TEACHER, False), num_passes=1)


def _without_own_reference(roles: list[RoleCost]) -> tuple[RoleCost, ...]:
    """Drop a reference that is the policy without its adapter; the policy computes it."""
    policy, *others = roles
    left = [each for each in others if each.role != "reference" or policy.lora is None]
    again = len(others) - len(left)
    return (replace(policy, num_passes=policy.num_passes + again), *left)


def _served(
    stage: ServingStageConfig, prompt_tokens: int, answer: int, count: int | None, shape_of: ShapeOf
) -> Workload:
    is_against = isinstance(stage, EvaluateStageConfig) and stage.model_section == AGAINST
    shape = shape_of("against.path" if is_against else _MODEL, False)
    dtype = stage.rollout.dtype or stage.dtype
    unknown = () if count else ("the number of problems is that of the data: no seconds",)
    return Workload(
        sampled=SampledWork(shape, stage.rollout, dtype, prompt_tokens, answer, count),
        notes=(_lengths(prompt_tokens, answer), *unknown, *shape.uncounted),
    )


def _lengths(prompt_tokens: int, answer_tokens: int) -> str:
    return (
        f"every prompt has {prompt_tokens} tokens (data.max_prompt_length), every answer "
        f"{answer_tokens} (its limit)"
    )
