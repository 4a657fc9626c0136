"""Selects the models, data and rewards of a recipe that a child process checks."""

from engines.config.plugins import REWARDS
from engines.config.preflight_request import PreflightRequest
from engines.config.recipe import Recipe
from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from flows.stage_order import stages_of


def request_of(recipe: Recipe) -> PreflightRequest | None:
    """Return what the child process checks; None if the recipe uses nothing from outside."""
    ours = {row.name for row in REWARDS.rows}
    own = {*recipe.rl.reward.functions} <= ours
    reward, teacher = recipe.rl.reward, recipe.rl.distillation
    has_rounds = recipe.rl.num_rounds > 0
    has_critic = has_rounds and recipe.rl.critic is not None
    self_play = recipe.preference.self_play if recipe.preference else None
    samples = has_rounds or (self_play is not None and self_play.source == "best_worst")
    read = (recipe.model.path, recipe.against, teacher, *reward.models)
    is_made = all(each is None for each in read)
    suites = recipe.suites.values()
    all_own = own and all(
        {*suite.reward.functions} <= ours for suite in suites if suite.reward is not None
    )
    data = (recipe.data, *recipe.data_suites.values())
    if all_own and is_made and all(each and each.arithmetic for each in data):
        return None
    return PreflightRequest(
        model=recipe.model,
        trains=recipe.trains,
        against=recipe.against,
        data=recipe.data,
        suites=recipe.suites,
        training=recipe.training,
        averages=recipe.keeps_average,
        reward=None if own else recipe.rl.reward,
        scoring=reward,
        scored=("rl", "evaluation") if samples else ("evaluation",),
        reward_model=reward.model,
        # An evaluation runs it on a rank of its own, independent of the training settings.
        reward_training=recipe.training if has_rounds else TrainingConfig(),
        judge=reward.judge,
        teacher=teacher,
        rollout_engine=recipe.rollout.engine,
        self_play=self_play,
        has_critic=has_critic,
        trains_values=has_critic or recipe.reward_model is not None,
        answer_lengths={
            stage.answer_setting: stage.evaluation.answer_length
            for stage in stages_of(recipe)
            if isinstance(stage, EvaluateStageConfig)
        },
        stop_token_ids={
            "rl.sampling.stop_token_ids": recipe.rl.sampling.stop_token_ids,
            "evaluation.stop_token_ids": recipe.evaluation.stop_token_ids or (),
            **{
                f"suites.{name}.evaluation.stop_token_ids": suite.evaluation.stop_token_ids or ()
                for name, suite in recipe.suites.items()
            },
        },
    )
