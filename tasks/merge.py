"""Stage `merge`: sharded policy checkpoint to a Hugging Face directory.

Needs the last `policy`. Yields a `model` that `AutoModelForCausalLM.from_pretrained` loads.
"""

from engines.config.stages import MergeStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.merge"


@stage_task("merge")
def merge(run: StageRunner, config: MergeStageConfig, seed: int, policy: Artifact) -> StageResult:
    """Write the policy as safetensors."""
    return run.run(
        StageRequest(
            stage="merge",
            label="merge",
            job_module=JOB_MODULE,
            config=config,
            inputs={"policy": policy},
            seed=seed,
        )
    )
