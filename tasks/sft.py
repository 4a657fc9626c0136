"""Stage `sft`: supervised fine-tuning.

Needs the `dataset` and the model. Yields a `policy`: sharded checkpoint with optimizer, and the
Hugging Face configuration and tokenizer beside it.
"""

from engines.config.backends import job_interpreter
from engines.config.stages import SFTStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest, model_input, plugin_modules
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.sft"


@stage_task("sft")
def sft(run: StageRunner, config: SFTStageConfig, seed: int, dataset: Artifact) -> StageResult:
    """Train the model on the supervised rows."""
    return run.run(
        StageRequest(
            stage="sft",
            label="sft",
            job_module=JOB_MODULE,
            config=config,
            inputs={"dataset": dataset, **model_input(config.model)},
            seed=seed,
            interpreter=job_interpreter(config.training.backend, "training.backend"),
            plugins=plugin_modules(backend=config.training.backend),
        )
    )
