"""What comes after what.

[suites], preprocess, [SFT], [reward model], [preference, with self-play in iterations], RL rounds,
merge, [soup], evaluate, [harness], [compare], promote. A recipe that trains nothing has its model
evaluated.

Knows no Prefect: a plan asks for the same stages as the flow, and costs no import of it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engines.config.stages.final import EvaluateStageConfig
from flows.recipe.recipe import Recipe
from infra.errors import ServiceError, SickRunError
from infra.store.stage_spec import Artifact
from tasks.runner.run import StageResult, StageRunner
from tasks.stages import (
    NOTHING_HELD_OUT,
    compare,
    evaluate,
    harness,
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


@dataclass(frozen=True)
class Trained:
    """What training came to.

    Attributes:
        dataset: the recipe's own.
        policies: by the stage that made them, in order; a rejected round has none.
        judge: the reward model that the run trained, if answers are judged by it.
    """

    dataset: Artifact
    policies: Mapping[str, Artifact]
    judge: Artifact | None


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
    # First of all: what a suite's rows lack is found before anything trains.
    suites = {
        name: preprocess(run, recipe.preprocess_suite_stage(name)).artifact
        for name in recipe.data_suites
    }
    data = None
    if recipe.data:
        held_out = suites if recipe.trains else NOTHING_HELD_OUT
        data = preprocess(run, recipe.preprocess_stage(), held_out).artifact
    if data is None or not recipe.trains:
        _measure(recipe, run, data, suites)
        return
    trained = _train(recipe, run, data, accepts)
    model = _final_model(recipe, run, trained)
    measured = _measure(recipe, run, data, suites, model, trained.judge)
    _promote(recipe, run, model, measured[recipe.promote.suite or OWN], find_incumbent)


def _train(
    recipe: Recipe,
    run: StageRunner,
    data: Artifact,
    accepts: Callable[[StageResult, StageResult], bool],
) -> Trained:
    """SFT, the reward model, preferences and rounds, with an evaluation of each policy."""
    policy = judge = tuned = None
    policies: dict[str, Artifact] = {}
    if recipe.sft:
        scores = recipe.evaluate_stage("sft")
        # An evaluation that asks the reward model waits for it.
        after = None if recipe.asks_reward_model else scores
        tuned = sft(run, recipe.sft_stage(), dataset=data, then=after)
        policy = policies["sft"] = tuned.artifact
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
        policy = policies[stage.label] = tuned.artifact
        accepts(tuned, evaluate(run, scores, policy=policy, **given))
    reference = policy
    for number in range(1, recipe.rl.num_rounds + 1):
        stage = recipe.rl_round_stage(number)
        scores = recipe.evaluate_stage(stage.label)
        tuned = rl_round(run, stage, policy=policy, reference=reference, then=scores, **given)
        if accepts(tuned, evaluate(run, scores, policy=tuned.artifact, **given)):
            policy = policies[stage.label] = tuned.artifact
    if not policies:
        raise SickRunError("every round was rejected (diagnosis.reject_round): nothing is trained")
    return Trained(data, policies, judge)


def _final_model(recipe: Recipe, run: StageRunner, trained: Trained) -> Artifact:
    """The last policy, or the mean of several, as a user would load it."""
    given = {"dataset": trained.dataset, "reward_model": trained.judge}
    policies = list(trained.policies.items())
    if not recipe.soup:
        final = recipe.evaluate_stage()
        _, last = policies[-1]
        return merge(run, recipe.merge_stage(), policy=last, then=final, **given).artifact
    merges = [
        (recipe.merge_stage(label), policy)
        for label, policy in policies[-recipe.soup.num_policies :]
    ]
    models = [merge(run, stage, policy=policy, **given).artifact for stage, policy in merges]
    return soup(run, recipe.soup_stage(len(models)), models).artifact


@dataclass(frozen=True)
class Measured:
    """What a model was measured on, and what came of it.

    Attributes:
        asked: the stage that measured.
        problems: held out.
        judge: the reward model that judged the answers, if the run trained one.
        scores: the evaluation.
    """

    asked: EvaluateStageConfig
    problems: Artifact
    judge: Artifact | None
    scores: Artifact


OWN = ""
"""In place of a suite's name: the recipe's own problems."""


def _measure(
    recipe: Recipe,
    run: StageRunner,
    data: Artifact | None,
    suites: Mapping[str, Artifact],
    model: Artifact | None = None,
    judge: Artifact | None = None,
) -> dict[str, Measured]:
    """The final model, or else the recipe's own, on everything; by suite, but for a harness's."""
    asked = [(OWN, recipe.evaluate_stage(), data, judge)] if data else []
    for name, problems in suites.items():
        of_suite = None if recipe.suites[name].reward else judge
        asked.append((name, recipe.evaluate_suite_stage(name), problems, of_suite))
    found = {}
    for name, stage, problems, of_suite in asked:
        given = {"dataset": problems, "reward_model": of_suite}
        scores = evaluate(run, stage, model=model, **given).artifact
        found[name] = Measured(stage, problems, of_suite, scores)
        if recipe.against:
            theirs = evaluate(run, recipe.against_stage(stage), **given).artifact
            compare(run, recipe.compare_stage(name), evaluation=scores, against=theirs)
    for name in recipe.harness_suites:
        scores = harness(run, recipe.harness_stage(name), model).artifact
        if recipe.against:
            theirs = harness(run, recipe.harness_stage(name, is_against=True)).artifact
            compare(run, recipe.compare_stage(name), evaluation=scores, against=theirs)
    return found


def _promote(
    recipe: Recipe,
    run: StageRunner,
    model: Artifact,
    measured: Measured,
    find_incumbent: Callable[[Artifact], Artifact | None],
) -> None:
    """Compare the model with the incumbent, by the evaluation that decides."""
    try:
        incumbent = find_incumbent(model)
    except ServiceError as error:  # without a comparison nothing is promoted; the rest stands
        _log.warning("promote: %s", error)
        return
    scores = None
    if incumbent:
        scores = evaluate(
            run,
            measured.asked.model_copy(update={"of": "incumbent"}),
            dataset=measured.problems,
            model=incumbent,
            reward_model=measured.judge,
        ).artifact
    promote(
        run,
        recipe.promote_stage(),
        evaluation=measured.scores,
        model=model,
        incumbent=incumbent,
        incumbent_evaluation=scores,
    )
