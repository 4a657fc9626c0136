"""Stage `evaluate`: a policy, or the merged model, on the held-out rows.

Needs the `dataset` and a `policy` or a `model`. Yields an `evaluation`: `rows.parquet` with every
text, and `summary.json` with pass@1, pass@k and confidence intervals.
"""

from engines.config.backends import job_interpreter
from engines.config.stages import EvaluateStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest, plugin_modules, reward_input
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.evaluate"


@stage_task("{label}")
def evaluate(
    run: StageRunner,
    config: EvaluateStageConfig,
    seed: int,
    dataset: Artifact,
    *,
    policy: Artifact | None = None,
    model: Artifact | None = None,
    label: str,
) -> StageResult:
    """Score a policy as soon as it is trained, or the model as a user would load it."""
    evaluated = {"policy": policy, "model": model}
    return run.run(
        StageRequest(
            stage="evaluate",
            label=label,
            job_module=JOB_MODULE,
            config=config,
            inputs={
                "dataset": dataset,
                **{name: artifact for name, artifact in evaluated.items() if artifact},
                **reward_input(config.reward),
            },
            seed=seed,
            interpreter=job_interpreter(config.backend, "training.backend")
            if config.backend
            else None,
            plugins=plugin_modules(
                backend=config.backend, rollout=config.rollout, reward=config.reward
            ),
        )
    )
