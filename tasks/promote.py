"""Stage `promote`: the gate in front of the model registry.

Needs the `evaluation` and the `model` it speaks of. Yields a `promotion`: `decision.json`.
Whoever sees the committed promotion first on a tracking server registers the model there.
"""

from engines.config.stages import PromoteStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.promote"


@stage_task("promote")
def promote(
    run: StageRunner, config: PromoteStageConfig, seed: int, evaluation: Artifact, model: Artifact
) -> StageResult:
    """Decide whether the model may bear the alias."""
    return run.run(
        StageRequest(
            stage="promote",
            label="promote",
            job_module=JOB_MODULE,
            config=config,
            inputs={"evaluation": evaluation, "model": model},
            seed=seed,
        )
    )
