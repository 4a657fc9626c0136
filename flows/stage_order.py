"""What comes after what: preprocess, SFT, RL rounds, merge, evaluate, promote.

Knows no Prefect: a plan asks for the same stages as the flow, and costs no import of it.
"""

from flows.recipe.recipe import Recipe
from tasks.runner.run import StageResult, StageRunner
from tasks.stages import evaluate, merge, preprocess, promote, rl_round, sft


def run_stages(recipe: Recipe, run: StageRunner) -> StageResult:
    """Every stage in order; each is skipped if its output exists.

    Args:
        recipe: what to run.
        run: runs each stage, or plans it.

    Returns:
        The result of the last stage.
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
    return promote(run, recipe.promote_stage(), evaluation=evaluation, model=model)
