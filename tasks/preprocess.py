"""Stage `preprocess`: raw data to checked rows.

Needs the data sources (generated data need none) and the model, for its tokenizer.
Yields a `dataset`: `sft.parquet`, `rl.parquet`, `eval.parquet`, `summary.json`, and `tokenizer/`
when the model is made from scratch.
"""

from pathlib import Path

from engines.config.data import DataConfig
from engines.config.stages import PreprocessStageConfig
from infra.store.artifacts import external_artifact
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest, model_input, plugin_modules
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.preprocess"


@stage_task("preprocess")
def preprocess(run: StageRunner, config: PreprocessStageConfig, seed: int) -> StageResult:
    """Check, split and store the rows of all sources."""
    return run.run(
        StageRequest(
            stage="preprocess",
            label="preprocess",
            job_module=JOB_MODULE,
            config=config,
            inputs={**source_inputs(config.data), **model_input(config.model)},
            seed=seed,
            plugins=plugin_modules(data=config.data),
        )
    )


def source_inputs(data: DataConfig) -> dict[str, Artifact]:
    """Every local source as an input, so that one changed row changes the fingerprint."""
    groups = {"sft": data.sft, "rl": data.rl, "evaluation": data.evaluation}
    return {
        f"data.{split}.{index}": external_artifact(path)
        for split, sources in groups.items()
        for index, source in enumerate(sources)
        if (path := Path(source.path).expanduser()).exists()
    }
