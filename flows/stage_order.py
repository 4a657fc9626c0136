"""Runs the stages of a recipe in their order.

[suites], preprocess, [SFT], [reward model], [preference, with self-play in iterations], RL rounds,
merge, [soup], evaluate, [harness], [compare], promote. A recipe without training only evaluates.

This module does not import Prefect, which `rlhf plan` does not need.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engines.config.recipe import Recipe
from engines.config.stages.base import REWARD_MODEL, StageConfig
from engines.config.stages.data import HELD_OUT, PreprocessStageConfig
from engines.config.stages.final import (
    CompareStageConfig,
    EvaluateStageConfig,
    HarnessStageConfig,
    MergeStageConfig,
    PromoteStageConfig,
    SoupStageConfig,
)
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
from infra.errors import ServiceError, SickRunError
from infra.store.stage_spec import Artifact
from tasks.runner.run import StageRequest, StageResult, StageRunner, run_stage, stage_request

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DryRun:
    """A `StageRunner` that only records which stages are requested."""

    seed: int = 0
    stages: list[StageConfig] = field(default_factory=list)

    def run(self, request: StageRequest) -> StageResult:
        """Record a stage; its output is a placeholder."""
        self.stages.append(request.config)
        return StageResult(
            label=request.label,
            fingerprint="",
            artifact=Artifact(kind="not made", uri=request.label, digest=""),
            reused=False,
            wall_s=0.0,
            metrics={},
            job_seconds={},
        )


def stages_of(recipe: Recipe) -> list[StageConfig]:
    """Return a run's stages in order, if every round is accepted and there is no incumbent."""
    dry_run = DryRun()
    run_stages(recipe, dry_run, lambda _: None)
    return dry_run.stages


@dataclass(frozen=True)
class Measured:
    """An evaluation of the final model; `given` has its problems and the reward model it used."""

    stage: EvaluateStageConfig
    given: Mapping[str, Artifact | None]
    scores: Artifact


OWN = ""
"""Suite name of the recipe's own problems."""


def run_stages(
    recipe: Recipe,
    run: StageRunner,
    find_incumbent: Callable[[Artifact], Artifact | None],
    accepts: Callable[[StageResult, StageResult], bool] = lambda trained, scores: True,  # noqa: ARG005
) -> None:
    """Run every stage in order; `SickRunError` if no stage leaves a policy, or from `accepts`.

    Args:
        find_incumbent: returns the registered model that a given one has to beat, or None.
        accepts: called with a training stage and its evaluation; False drops an RL round's policy.
    """
    order = StageOrder(recipe, run, find_incumbent, accepts)
    # First, so that faults in a suite's data are found before anything trains.
    suites = {
        name: run_stage(run, PreprocessStageConfig.of_suite(recipe, name)).artifact
        for name in recipe.data_suites
    }
    data = None
    if recipe.data:
        held_out = {f"{HELD_OUT}{name}": rows for name, rows in suites.items()}
        given = held_out if recipe.trains else {}
        data = run_stage(run, PreprocessStageConfig.from_recipe(recipe), **given).artifact
    if data is None or not recipe.trains:
        order.measure(data, suites)
        return
    policies, judge = order.train(data)
    model = order.final_model(policies, {"dataset": data, REWARD_MODEL: judge})
    order.promote(model, order.measure(data, suites, model, judge)[recipe.promote.suite or OWN])


@dataclass(frozen=True)
class StageOrder:
    """Runs parts of the order of a recipe's stages; its fields are arguments of `run_stages`."""

    recipe: Recipe
    run: StageRunner
    find_incumbent: Callable[[Artifact], Artifact | None]
    accepts: Callable[[StageResult, StageResult], bool]

    def train(self, data: Artifact) -> tuple[Mapping[str, Artifact], Artifact | None]:
        """Run SFT, the reward model, preferences and rounds, and evaluate each policy.

        Returns:
            Policies by label of the stage that made them, in order, without rejected rounds; and
            the reward model that the run trained, if it scores answers.

        Raises:
            SickRunError: no stage left a policy.
        """
        recipe, run = self.recipe, self.run
        policies: dict[str, Artifact] = {}
        given: dict[str, Artifact | None] = {"dataset": data}
        judge = given[REWARD_MODEL] = self._fine_tune(given, policies)
        for iteration in recipe.preference_iterations:
            policy, pairs = _newest(policies), None
            if iteration and policy:
                play = SelfPlayStageConfig.from_recipe(recipe, iteration)
                pairs = run_stage(run, play, policy=policy, **given).artifact
            stage = PreferenceStageConfig.from_recipe(recipe, iteration)
            policies[stage.label], _ = self._scored(stage, given, policy=policy, pairs=pairs)
        reference = _newest(policies)  # of all rounds
        for number in range(1, recipe.rl.num_rounds + 1):
            stage = RLRoundStageConfig.from_recipe(recipe, number)
            made, is_accepted = self._scored(
                stage, given, policy=_newest(policies), reference=reference
            )
            if is_accepted:
                policies[stage.label] = made
        if not policies:
            raise SickRunError(
                "every round was rejected, so no policy is left; follow `rlhf diagnose`, or remove "
                "symptoms from diagnosis.reject_round"
            )
        return policies, judge

    def _fine_tune(
        self, given: Mapping[str, Artifact | None], policies: dict[str, Artifact]
    ) -> Artifact | None:
        """Run SFT and the reward model; return the latter if it scores answers."""
        recipe, run = self.recipe, self.run
        scores = EvaluateStageConfig.from_recipe(recipe, "sft")
        tuned = judge = None
        if recipe.sft:
            # An evaluation that uses the reward model has to wait for it.
            after = None if recipe.asks_reward_model else stage_request(scores, run.seed, **given)
            tuned = run_stage(run, SFTStageConfig.from_recipe(recipe), after, **given)
            policies["sft"] = tuned.artifact
        policy = _newest(policies)
        if recipe.reward_model:
            stage = RewardModelStageConfig.from_recipe(recipe)
            made = run_stage(run, stage, policy=policy, **given).artifact
            judge = made if recipe.asks_reward_model else None
        if tuned:
            judged = {**given, REWARD_MODEL: judge}
            self.accepts(tuned, run_stage(run, scores, policy=policy, **judged))
        return judge

    def _scored(
        self, stage: StageConfig, given: Mapping[str, Artifact | None], **more: Artifact | None
    ) -> tuple[Artifact, bool]:
        """Run a training stage and its evaluation; return the policy, and True if accepted."""
        scores = EvaluateStageConfig.from_recipe(self.recipe, stage.label)
        after = stage_request(scores, self.run.seed, **given)
        tuned = run_stage(self.run, stage, after, **given, **more)
        evaluated = run_stage(self.run, scores, policy=tuned.artifact, **given)
        return tuned.artifact, self.accepts(tuned, evaluated)

    def final_model(
        self, policies: Mapping[str, Artifact], given: Mapping[str, Artifact | None]
    ) -> Artifact:
        """Merge the last policy, or the mean of several, into a Hugging Face directory.

        `given` are the artifacts that the evaluation of the model needs besides the model.
        """
        recipe = self.recipe
        if not recipe.soup:
            after = stage_request(EvaluateStageConfig.from_recipe(recipe), self.run.seed, **given)
            stage = MergeStageConfig.from_recipe(recipe)
            return run_stage(self.run, stage, after, policy=_newest(policies)).artifact
        models = [
            run_stage(self.run, MergeStageConfig.from_recipe(recipe, label), policy=each).artifact
            for label, each in [*policies.items()][-recipe.soup.num_policies :]
        ]
        soup = SoupStageConfig.from_recipe(recipe, len(models))
        named = {soup.input_name(place): model for place, model in enumerate(models)}
        return run_stage(self.run, soup, **named).artifact

    def measure(
        self,
        data: Artifact | None,
        suites: Mapping[str, Artifact],
        model: Artifact | None = None,
        judge: Artifact | None = None,
    ) -> dict[str, Measured]:
        """Evaluate the final or else the recipe's own model; return results by suite with data."""
        recipe, run = self.recipe, self.run
        asked = [(OWN, EvaluateStageConfig.from_recipe(recipe), data, judge)] if data else []
        for name, problems in suites.items():
            scorer = None if recipe.suites[name].reward else judge
            asked.append((name, EvaluateStageConfig.of_suite(recipe, name), problems, scorer))
        found = {}
        for name, stage, problems, scorer in asked:
            given = {"dataset": problems, REWARD_MODEL: scorer}
            scores = run_stage(run, stage, model=model, **given).artifact
            found[name] = Measured(stage, given, scores)
            if recipe.against:
                other = run_stage(run, stage.against(recipe.against), **given).artifact
                self.compare(name, scores, other)
        for name in recipe.harness_suites:
            tasks = HarnessStageConfig.from_recipe(recipe, name)
            scores = run_stage(run, tasks, model=model).artifact
            if recipe.against:
                tasks = HarnessStageConfig.from_recipe(recipe, name, is_against=True)
                self.compare(name, scores, run_stage(run, tasks).artifact)
        return found

    def compare(self, suite: str, scores: Artifact, against: Artifact) -> None:
        """Compare two evaluations of the same problems."""
        run_stage(
            self.run,
            CompareStageConfig.from_recipe(self.recipe, suite),
            evaluation=scores,
            against=against,
        )

    def promote(self, model: Artifact, measured: Measured) -> None:
        """Compare the model with the incumbent, and register it if it is better."""
        try:
            incumbent = self.find_incumbent(model)
        except ServiceError as error:  # nothing is promoted, but the run goes on
            _log.warning("promote: %s", error)
            return
        scores = None
        if incumbent:
            stage = measured.stage.model_copy(update={"of": "incumbent"})
            scores = run_stage(self.run, stage, model=incumbent, **measured.given).artifact
        run_stage(
            self.run,
            PromoteStageConfig.from_recipe(self.recipe),
            evaluation=measured.scores,
            model=model,
            incumbent=incumbent,
            incumbent_evaluation=scores,
        )


def _newest(policies: Mapping[str, Artifact]) -> Artifact | None:
    return [*policies.values()][-1] if policies else None
