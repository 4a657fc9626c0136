"""What comes after what: preprocess, SFT, RL rounds, merge, evaluate, promote.

Knows no Prefect: a plan asks for the same stages as the flow, and costs no import of it.
"""

import logging
from collections.abc import Callable

from flows.recipe.recipe import Recipe
from infra.errors import ServiceError
from infra.store.stage_spec import Artifact
from tasks.runner.run import StageRunner
from tasks.stages import evaluate, merge, preprocess, promote, rl_round, sft

_log = logging.getLogger(__name__)


def run_stages(
    recipe: Recipe, run: StageRunner, find_incumbent: Callable[[Artifact], Artifact | None]
) -> None:
    """Every stage in order; each is skipped if its output exists.

    Args:
        recipe: what to run.
        run: runs each stage, or plans it.
        find_incumbent: whom the model has to beat (`flows.run.registry`).
    """
    data = preprocess(run, recipe.preprocess_stage()).artifact
    policy = None
    if recipe.sft:
        scores = recipe.evaluate_stage("sft")
        policy = sft(run, recipe.sft_stage(), dataset=data, then=scores).artifact
        evaluate(run, scores, dataset=data, policy=policy)
    reference = policy
    for number in range(1, recipe.rl.num_rounds + 1):
        stage = recipe.rl_round_stage(number)
        scores = recipe.evaluate_stage(stage.label)
        policy = rl_round(
            run, stage, dataset=data, policy=policy, reference=reference, then=scores
        ).artifact
        evaluate(run, scores, dataset=data, policy=policy)
    if policy is None:
        raise ValueError("the recipe trains nothing")
    final = recipe.evaluate_stage()
    model = merge(run, recipe.merge_stage(), policy=policy, dataset=data, then=final).artifact
    evaluation = evaluate(run, final, dataset=data, model=model).artifact
    try:
        incumbent = find_incumbent(model)
    except ServiceError as error:  # without a comparison nothing is promoted; the rest stands
        _log.warning("promote: %s", error)
        return
    scores = None
    if incumbent:
        again = final.model_copy(update={"of": "incumbent"})
        scores = evaluate(run, again, dataset=data, model=incumbent).artifact
    promote(
        run,
        recipe.promote_stage(),
        evaluation=evaluation,
        model=model,
        incumbent=incumbent,
        incumbent_evaluation=scores,
    )
