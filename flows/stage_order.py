"""What comes after what: preprocess, SFT, RL rounds, merge, evaluate, promote.

Knows no Prefect: a plan asks for the same stages as the flow, and costs no import of it.
"""

import logging
from collections.abc import Callable

from flows.recipe.recipe import Recipe
from infra.errors import ServiceError, SickRunError
from infra.store.stage_spec import Artifact
from tasks.runner.run import StageResult, StageRunner
from tasks.stages import evaluate, merge, preprocess, promote, rl_round, sft

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
    policy = None
    if recipe.sft:
        scores = recipe.evaluate_stage("sft")
        trained = sft(run, recipe.sft_stage(), dataset=data, then=scores)
        policy = trained.artifact
        accepts(trained, evaluate(run, scores, dataset=data, policy=policy))
    reference = policy
    for number in range(1, recipe.rl.num_rounds + 1):
        stage = recipe.rl_round_stage(number)
        scores = recipe.evaluate_stage(stage.label)
        trained = rl_round(
            run, stage, dataset=data, policy=policy, reference=reference, then=scores
        )
        if accepts(trained, evaluate(run, scores, dataset=data, policy=trained.artifact)):
            policy = trained.artifact
    if policy is None:
        raise SickRunError("every round was rejected (diagnosis.reject_round): nothing is trained")
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
