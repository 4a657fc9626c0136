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
from engines.config.sections import RLConfig
from engines.config.stages.base import StageConfig, TrainingStageConfig
from engines.config.stages.final import AGAINST, EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig, ServingStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
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


@dataclass(frozen=True)
class SampledWork:
    """A model that engines sample from.

    Attributes:
        dtype: of its weights and cache.
        num_sequences: samples of a step, over all engines; None if only data tells.
        sync_parameters: numbers that a sync sends; 0 if weights are loaded once.
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

    label: str
    roles: tuple[RoleCost, ...] = ()
    training: TrainingConfig = field(default_factory=TrainingConfig)
    num_sequences: int = 0
    sequence_tokens: int = 0
    unit_tokens: int = 0
    num_updates: int = 1
    sampled: SampledWork | None = None
    notes: tuple[str, ...] = ()


def workload_of(stage: StageConfig, prompt_tokens: int, shape_of: ShapeOf) -> Workload | None:
    """Return what a step of a stage computes; None if it uses no device.

    Args:
        prompt_tokens: limit of a prompt (`data.max_prompt_length`).

    Raises:
        ValueError, ConfigError: raised by `shape_of`.
    """
    if isinstance(stage, RLRoundStageConfig):
        return _rl_round(stage, prompt_tokens, shape_of)
    if isinstance(stage, TrainingStageConfig):
        return _supervised(stage, shape_of)
    if isinstance(stage, EvaluateStageConfig):
        evaluation = stage.evaluation
        answers = 1 + (evaluation.num_samples or 0)
        count = evaluation.num_problems and evaluation.num_problems * answers
        return _served(stage, prompt_tokens, evaluation.answer_length, count, shape_of)
    if isinstance(stage, SelfPlayStageConfig):
        play = stage.self_play
        count = play.num_prompts and play.num_prompts * play.samples_per_prompt
        return _served(stage, prompt_tokens, stage.sampling.max_new_tokens, count, shape_of)
    return None


def _supervised(stage: TrainingStageConfig, shape_of: ShapeOf) -> Workload | None:
    values = isinstance(stage, RewardModelStageConfig)
    if isinstance(stage, SFTStageConfig):
        section, num_sequences = stage.sft, stage.sft.batch_size_sequences
    elif isinstance(stage, RewardModelStageConfig):
        section, num_sequences = stage.reward_model, 2 * stage.reward_model.batch_size_pairs
    elif isinstance(stage, PreferenceStageConfig):
        section, num_sequences = stage.preference, 2 * stage.preference.batch_size_pairs
    else:
        return None
    training, shape = stage.training, shape_of(_MODEL, values)
    roles = [
        RoleCost(
            "policy",
            shape,
            num_trained=1,
            lora=training.lora,
            keeps_average=section.optimizer.ema is not None,
        )
    ]
    if isinstance(stage, PreferenceStageConfig) and stage.preference.loss in _REFERENCE_LOSSES:
        roles.append(RoleCost("reference", shape, num_passes=1))
    length = stage.model.max_length
    in_pairs = values or (
        isinstance(stage, PreferenceStageConfig)
        and PREFERENCE_LOSSES.find(stage.preference.loss).paired
    )
    return Workload(
        label=stage.label,
        roles=_without_own_reference(roles, training),
        training=training,
        num_sequences=num_sequences,
        sequence_tokens=length,
        unit_tokens=length * (2 if in_pairs else 1),
        notes=(f"every sequence has {length} tokens (model.max_length)", *shape.uncounted),
    )


def _rl_round(stage: RLRoundStageConfig, prompt_tokens: int, shape_of: ShapeOf) -> Workload:
    rl, training, rollout = stage.rl, stage.training, stage.rollout
    shape = shape_of(_MODEL, False)
    answer, count = rl.sampling.max_new_tokens, rl.batch_size_prompts * rl.group_size
    num_updates = rl.batch_size_prompts // rl.prompts_per_update
    if adapter_travels(training, rollout) and training.lora:
        sent = shape.adapter_parameters(training.lora)
    else:
        sent = shape.num_parameters
    return Workload(
        label=stage.label,
        roles=_without_own_reference([*_rl_roles(rl, training, shape, shape_of)], training),
        training=training,
        num_sequences=count,
        sequence_tokens=prompt_tokens + answer,
        unit_tokens=prompt_tokens + answer,
        num_updates=num_updates,
        sampled=SampledWork(
            shape,
            rollout,
            rollout.dtype or training.dtype,
            prompt_tokens,
            answer,
            count,
            sync_parameters=sent,
        ),
        notes=(
            _lengths(prompt_tokens, answer),
            *shape.uncounted,
        ),
    )


def _rl_roles(
    rl: RLConfig, training: TrainingConfig, shape: ModelShape, shape_of: ShapeOf
) -> Iterator[RoleCost]:
    """Yield the roles of `engines.jobs.rl_round`."""
    algorithm = rl.algorithm
    columns = {
        *ADVANTAGES.find(algorithm.adv_estimator).columns,
        *POLICY_LOSSES.find(algorithm.loss_mode).columns,
    }
    is_repeated = rl.num_epochs > 1 or rl.prompts_per_update < rl.batch_size_prompts
    reads_old = is_repeated or algorithm.use_kl_in_reward or "old_logprobs" in columns
    ema = rl.optimizer.ema is not None
    yield RoleCost("policy", shape, int(reads_old), rl.num_epochs, training.lora, ema)
    if rl.critic is not None:
        start = _REWARD if rl.critic.start == "reward_model" else _MODEL
        epochs = rl.critic.num_epochs or rl.num_epochs
        ema = rl.critic.optimizer.ema is not None
        yield RoleCost("critic", shape_of(start, True), 1, epochs, keeps_average=ema)
    if algorithm.needs_reference:
        yield RoleCost("reference", shape, num_passes=1)
    if rl.reward.model is not None:
        yield RoleCost("reward", shape_of(_REWARD, True), num_passes=1)
    if rl.distillation is not None and rl.distillation.served is None:
        yield RoleCost("teacher", shape_of(_TEACHER, False), num_passes=1)


def _without_own_reference(roles: list[RoleCost], training: TrainingConfig) -> tuple[RoleCost, ...]:
    """Drop a reference that is the policy without its adapter; the policy computes it."""
    if training.lora is None or all(each.role != "reference" for each in roles):
        return tuple(roles)
    policy, *rest = roles
    again = replace(policy, num_passes=policy.num_passes + 1)
    return (again, *(each for each in rest if each.role != "reference"))


def _served(
    stage: ServingStageConfig, prompt_tokens: int, answer: int, count: int | None, shape_of: ShapeOf
) -> Workload:
    is_against = isinstance(stage, EvaluateStageConfig) and stage.model_section == AGAINST
    shape = shape_of("against.path" if is_against else _MODEL, False)
    dtype = stage.rollout.dtype or stage.dtype
    unknown = () if count else ("the number of problems is that of the data: no seconds",)
    return Workload(
        label=stage.label,
        sampled=SampledWork(shape, stage.rollout, dtype, prompt_tokens, answer, count),
        notes=(
            _lengths(prompt_tokens, answer),
            *unknown,
            *shape.uncounted,
        ),
    )


def _lengths(prompt_tokens: int, answer_tokens: int) -> str:
    return (
        f"every prompt has {prompt_tokens} tokens (data.max_prompt_length), every answer "
        f"{answer_tokens} (its limit)"
    )
