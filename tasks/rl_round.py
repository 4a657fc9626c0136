"""Stage `rl_round`: one round of RL; a pipeline has as many as it likes.

Needs the `policy` of the stage before, the `dataset`, and, when a KL loss is configured, the
policy that RL started from as `reference`. Yields a `policy`.
"""

from engines.config.backends import job_interpreter
from engines.config.stages import RLRoundStageConfig
from infra.store.stage_spec import Artifact
from tasks.runner.identity import StageRequest, model_input, plugin_modules, reward_input
from tasks.runner.prefect_task import stage_task
from tasks.runner.run import StageResult, StageRunner

JOB_MODULE = "engines.jobs.rl_round"


@stage_task("rl_round_{config.round}")
def rl_round(
    run: StageRunner,
    config: RLRoundStageConfig,
    seed: int,
    dataset: Artifact,
    policy: Artifact | None,
    reference: Artifact | None,
) -> StageResult:
    """Generate, score and train for one round; no policy means: start from the model itself."""
    inputs = {"dataset": dataset, **reward_input(config.reward)}
    if policy is None:
        inputs |= model_input(config.model)
    else:
        inputs["policy"] = policy
    if reference is not None and config.algorithm.use_kl_loss:
        inputs["reference"] = reference
    return run.run(
        StageRequest(
            stage="rl_round",
            label=f"rl_round_{config.round}",
            job_module=JOB_MODULE,
            config=config,
            inputs=inputs,
            seed=seed,
            interpreter=job_interpreter(config.training.backend, "training.backend"),
            plugins=plugin_modules(
                backend=config.training.backend,
                rollout=config.rollout,
                reward=config.reward,
                algorithm=config.algorithm,
            ),
        )
    )
