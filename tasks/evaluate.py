"""Stage `evaluate`: the merged model on the held-out rows.

Needs the `model` and the `dataset`. Yields an `evaluation`: `rows.parquet` with every text, and
`summary.json` with pass@1, pass@k and confidence intervals.
"""

from engines.config.stages import EvaluateStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest, plugin_modules, reward_input
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.evaluate"


@stage_task("evaluate")
def evaluate(
    run: StageRunner, config: EvaluateStageConfig, seed: int, model: Artifact, dataset: Artifact
) -> StageResult:
    """Score the model as a user would load it."""
    return run.run(
        StageRequest(
            stage="evaluate",
            label="evaluate",
            job_module=JOB_MODULE,
            config=config,
            inputs={"model": model, "dataset": dataset, **reward_input(config.reward)},
            seed=seed,
            plugins=plugin_modules(rollout=config.rollout, reward=config.reward),
        )
    )
