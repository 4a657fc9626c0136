"""What comes after what.

preprocess, [SFT], [reward model], [preference, with self-play in iterations], RL rounds, merge,
[soup], evaluate, promote.

Knows no Prefect: a plan asks for the same stages as the flow, and costs no import of it.
"""

import logging
from collections.abc import Callable

from flows.recipe.recipe import Recipe
from infra.errors import ServiceError, SickRunError
from infra.store.stage_spec import Artifact
from tasks.runner.run import StageResult, StageRunner
from tasks.stages import (
    evaluate,
    merge,
    preference,
    preprocess,
    promote,
    reward_model,
    rl_round,
    self_play,
    sft,
    soup,
)

_log = logging.getLogger(__name__)


def accept_all(trained: StageResult, evaluated: StageResult) -> bool:  # noqa: ARG001  (any of them)
    """A gate that stands open."""
    return True


def run_stages(
    recipe: Recipe,
    run: StageRunner,
    find_incumbent: Callable[[Artifact], Artifact | None],
    accepts: Callable[[StageResult, StageResult], bool] = accept_all,
) -> None:
    """Every stage in order; each is skipped if its output exists.

    Args:
        recipe: what to run.
        run: runs each stage, or plans it.
        find_incumbent: whom the model has to beat (`flows.run.registry`).
        accepts: whether what follows takes the policy of a stage, by its evaluation too
            (`flows.run.round_gate`); else it takes the one before.
    """
    data = preprocess(run, recipe.preprocess_stage()).artifact
    policy = judge = tuned = None
    trained: dict[str, Artifact] = {}
    if recipe.sft:
        scores = recipe.evaluate_stage("sft")
        # An evaluation that asks the reward model waits for it.
        after = None if recipe.asks_reward_model else scores
        tuned = sft(run, recipe.sft_stage(), dataset=data, then=after)
        policy = trained["sft"] = tuned.artifact
    if recipe.reward_model:
        made = reward_model(run, recipe.reward_model_stage(), dataset=data, policy=policy).artifact
        judge = made if recipe.asks_reward_model else None
    given = {"dataset": data, "reward_model": judge}
    if tuned:
        accepts(tuned, evaluate(run, recipe.evaluate_stage("sft"), policy=policy, **given))
    for iteration in recipe.preference_iterations:
        pairs = None
        if iteration and policy:
            pairs = self_play(run, recipe.self_play_stage(iteration), policy=policy, **given)
        stage = recipe.preference_stage(iteration)
        scores, made = recipe.evaluate_stage(stage.label), pairs.artifact if pairs else None
        tuned = preference(run, stage, policy=policy, pairs=made, then=scores, **given)
        policy = trained[stage.label] = tuned.artifact
        accepts(tuned, evaluate(run, scores, policy=policy, **given))
    reference = policy
    for number in range(1, recipe.rl.num_rounds + 1):
        stage = recipe.rl_round_stage(number)
        scores = recipe.evaluate_stage(stage.label)
        tuned = rl_round(run, stage, policy=policy, reference=reference, then=scores, **given)
        if accepts(tuned, evaluate(run, scores, policy=tuned.artifact, **given)):
            policy = trained[stage.label] = tuned.artifact
    if policy is None:
        raise SickRunError("every round was rejected (diagnosis.reject_round): nothing is trained")
    final = recipe.evaluate_stage()
    if recipe.soup:
        last = list(trained.items())[-recipe.soup.num_policies :]
        merges = [(recipe.merge_stage(label), each) for label, each in last]
        models = [merge(run, stage, policy=each, **given).artifact for stage, each in merges]
        model = soup(run, recipe.soup_stage(len(models)), models).artifact
    else:
        model = merge(run, recipe.merge_stage(), policy=policy, then=final, **given).artifact
    evaluation = evaluate(run, final, model=model, **given).artifact
    try:
        incumbent = find_incumbent(model)
    except ServiceError as error:  # without a comparison nothing is promoted; the rest stands
        _log.warning("promote: %s", error)
        return
    scores = None
    if incumbent:
        again = final.model_copy(update={"of": "incumbent"})
        scores = evaluate(run, again, model=incumbent, **given).artifact
    promote(
        run,
        recipe.promote_stage(),
        evaluation=evaluation,
        model=model,
        incumbent=incumbent,
        incumbent_evaluation=scores,
    )
