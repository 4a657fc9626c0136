"""The configurations of a recipe's stages: exactly what their fingerprints are made from.

Each is a method of `flows.recipe.recipe.Recipe` by the same name. A stage's job sees no more of the
recipe than its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engines.config.algorithm import RewardConfig
from engines.config.model import ModelConfig
from engines.config.sections import EvaluationConfig
from engines.config.stages.base import StageConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import (
    CompareStageConfig,
    EvaluateStageConfig,
    MergeStageConfig,
    PromoteStageConfig,
    SoupStageConfig,
)
from engines.config.stages.harness import HarnessStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)

if TYPE_CHECKING:
    from flows.recipe.recipe import Recipe

AGAINST = "against"


def preprocess_stage(recipe: Recipe) -> PreprocessStageConfig:
    """Configuration of the stage `preprocess`; the recipe must have data."""
    if recipe.data is None:
        raise ValueError("the recipe has no data")
    return PreprocessStageConfig(data=recipe.data, model=recipe.model)


def preprocess_suite_stage(recipe: Recipe, name: str) -> PreprocessStageConfig:
    """Configuration of the stage `preprocess` of a suite: rows of any model."""
    return PreprocessStageConfig(of=name, data=recipe.data_suites[name])


def sft_stage(recipe: Recipe) -> SFTStageConfig:
    """Configuration of the stage `sft`; the recipe must have one."""
    if recipe.sft is None:
        raise ValueError("the recipe has no SFT stage")
    return SFTStageConfig(
        model=recipe.model,
        training=recipe.training,
        sft=recipe.sft,
        checkpoint=recipe.checkpoint,
        hardware=recipe.hardware,
    )


def reward_model_stage(recipe: Recipe) -> RewardModelStageConfig:
    """Configuration of the stage `reward_model`; the recipe must have one."""
    if recipe.reward_model is None:
        raise ValueError("the recipe has no reward model stage")
    return RewardModelStageConfig(
        model=recipe.model,
        # An adapter is the policy's: all of a reward model is trained.
        training=recipe.training.model_copy(update={"lora": None}),
        reward_model=recipe.reward_model,
        max_shard_bytes=recipe.merge.max_shard_bytes,
        checkpoint=recipe.checkpoint,
        hardware=recipe.hardware,
    )


def self_play_stage(recipe: Recipe, iteration: int) -> SelfPlayStageConfig:
    """Configuration of the stage `self_play`, counted from 1; the recipe must have one."""
    if recipe.preference is None or recipe.preference.self_play is None:
        raise ValueError("the recipe has no self-play")
    section = recipe.preference.self_play
    return SelfPlayStageConfig(
        iteration=iteration,
        max_length=recipe.model.max_length,
        self_play=section,
        sampling=section.sampling or recipe.rl.sampling,
        backend=recipe.training.backend,
        num_threads=recipe.training.num_threads,
        dtype=recipe.training.dtype,
        rollout=recipe.rollout,
        reward=recipe.rl.reward if section.source == "best_worst" else RewardConfig(),
        hardware=recipe.hardware,
    )


def preference_stage(recipe: Recipe, iteration: int | None = None) -> PreferenceStageConfig:
    """Configuration of the stage `preference`, of an iteration of self-play where there is one."""
    if recipe.preference is None:
        raise ValueError("the recipe has no preference stage")
    return PreferenceStageConfig(
        iteration=iteration,
        model=recipe.model,
        training=recipe.training,
        # What the pairs are made of counts for them.
        preference=recipe.preference.model_copy(update={"self_play": None}),
        checkpoint=recipe.checkpoint,
        hardware=recipe.hardware,
    )


def rl_round_stage(recipe: Recipe, number: int) -> RLRoundStageConfig:
    """Configuration of RL round `number`, counted from 1."""
    return RLRoundStageConfig(
        round=number,
        model=recipe.model,
        training=recipe.training,
        rollout=recipe.rollout,
        rl=recipe.rl,
        checkpoint=recipe.checkpoint,
        hardware=recipe.hardware,
    )


def merge_stage(recipe: Recipe, of: str = "") -> MergeStageConfig:
    """Configuration of the stage `merge`: of a labelled stage's policy, or of the last one."""
    return MergeStageConfig(
        of=of,
        backend=recipe.training.backend,
        # A mean is taken of all digits, and rounded once.
        dtype="float32" if of else recipe.merge.dtype,
        max_shard_bytes=recipe.merge.max_shard_bytes,
    )


def soup_stage(recipe: Recipe, num_models: int) -> SoupStageConfig:
    """Configuration of the stage `soup`, which averages so many models."""
    return SoupStageConfig(
        num_models=num_models,
        dtype=recipe.merge.dtype,
        max_shard_bytes=recipe.merge.max_shard_bytes,
    )


def evaluate_stage(recipe: Recipe, of: str = "") -> EvaluateStageConfig:
    """Configuration of the stage `evaluate`: of a labelled stage's policy, or the final model."""
    return _evaluate_stage(recipe, of, recipe.evaluation, recipe.rl.reward, made_by_stage=bool(of))


def against_stage(recipe: Recipe, of_final: EvaluateStageConfig) -> EvaluateStageConfig:
    """Configuration of the stage that asks the model `against` what the final one was asked."""
    if recipe.against is None:
        raise ValueError("the recipe compares with no model")
    found = {
        "of": f"{of_final.of}_{AGAINST}".lstrip("_"),
        "model": _measured(recipe.against),
        "model_section": AGAINST,
    }
    return of_final.model_copy(update=found)


def compare_stage(recipe: Recipe, suite: str = "") -> CompareStageConfig:
    """Configuration of the stage `compare`, of a suite or of the recipe's own problems."""
    # A harness has no evaluation of its own: its intervals are at the recipe's confidence too.
    has_own = suite in recipe.data_suites
    evaluation = recipe.suites[suite].evaluation if has_own else recipe.evaluation
    return CompareStageConfig(of=suite, confidence=evaluation.confidence)


def evaluate_suite_stage(recipe: Recipe, name: str) -> EvaluateStageConfig:
    """Configuration of the stage `evaluate` of the final model on a suite."""
    suite = recipe.suites[name]
    stage = _evaluate_stage(recipe, name, suite.evaluation, suite.reward or recipe.rl.reward)
    return stage.model_copy(update={"suite": name, "own_reward": suite.reward is not None})


def harness_stage(recipe: Recipe, name: str, *, is_against: bool = False) -> HarnessStageConfig:
    """Configuration of the stage `harness` of a suite, for the final model or the one `against`."""
    own = None if recipe.trains else recipe.model
    model = recipe.against if is_against else own
    return HarnessStageConfig(
        suite=name,
        is_against=is_against,
        hardware=recipe.hardware,
        num_threads=recipe.training.num_threads,
        dtype=recipe.training.dtype,
        rollout=recipe.rollout,
        model=_measured(model) if model else None,
        harness=recipe.harness_suites[name],
        confidence=recipe.evaluation.confidence,
    )


def _evaluate_stage(
    recipe: Recipe,
    of: str,
    evaluation: EvaluationConfig,
    reward: RewardConfig,
    *,
    made_by_stage: bool = False,
) -> EvaluateStageConfig:
    # A job sees no more of the recipe, so the length limit is spelled out.
    sampling = recipe.rl.sampling
    names = ("max_new_tokens", "stop", "stop_token_ids")
    missing = {n: getattr(sampling, n) for n in names if getattr(evaluation, n) is None}
    return EvaluateStageConfig(
        of=of,
        hardware=recipe.hardware,
        num_threads=recipe.training.num_threads,
        dtype=recipe.training.dtype,
        backend=recipe.training.backend if made_by_stage else None,
        model=None if recipe.trains else _measured(recipe.model),
        evaluation=evaluation.model_copy(update=missing),
        rollout=recipe.rollout,
        reward=reward,
    )


def promote_stage(recipe: Recipe) -> PromoteStageConfig:
    """Configuration of the stage `promote`."""
    return PromoteStageConfig(promote=recipe.promote)


def stages(recipe: Recipe) -> Iterator[StageConfig]:
    """Every stage that the recipe has, in order; of rounds and iterations, alike, the first."""
    if recipe.data:
        yield preprocess_stage(recipe)
    if recipe.sft:
        yield sft_stage(recipe)
    if recipe.reward_model:
        yield reward_model_stage(recipe)
    for iteration in recipe.preference_iterations[:1]:
        if iteration:
            yield self_play_stage(recipe, iteration)
        yield preference_stage(recipe, iteration)
    if recipe.rl.num_rounds:
        yield rl_round_stage(recipe, 1)
    if recipe.trains:
        yield merge_stage(recipe)
    if recipe.soup:
        yield soup_stage(recipe, recipe.soup.num_policies)
    yield from _measuring_stages(recipe)
    if recipe.trains:
        yield promote_stage(recipe)


def _measuring_stages(recipe: Recipe) -> Iterator[StageConfig]:
    if recipe.data:
        yield evaluate_stage(recipe)
    for name in recipe.data_suites:
        yield preprocess_suite_stage(recipe, name)
        yield evaluate_suite_stage(recipe, name)
    for name in recipe.harness_suites:
        yield harness_stage(recipe, name)
    if recipe.against:
        yield compare_stage(recipe)


def _measured(model: ModelConfig) -> ModelConfig:
    """What counts of a model that is only measured: not the context that training would need."""
    if model.init == "random":
        return model  # is refused
    names = ("path", "revision", "chat_template")
    return ModelConfig(**{name: getattr(model, name) for name in names})
