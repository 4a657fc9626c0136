"""Every stage: what it needs, and the artifact that it yields.

Each takes whoever runs stages, its configuration and artifacts of the stages before, and is the
job `engines.jobs.<stage>`. The name of a parameter is the name by which the job knows it.
"""

from engines.config.stages import (
    EvaluateStageConfig,
    MergeStageConfig,
    PreprocessStageConfig,
    PromoteStageConfig,
    RLRoundStageConfig,
    SFTStageConfig,
)
from infra.store.stage_spec import Artifact
from infra.tracking.promotion import INCUMBENT
from tasks.runner.identity import stage_request
from tasks.runner.run import StageResult, StageRunner


def preprocess(run: StageRunner, config: PreprocessStageConfig) -> StageResult:
    """Raw data to a `dataset`: checked rows by split, and the tokenizer of a model made here."""
    return run.run(stage_request(config, run.seed))


def sft(
    run: StageRunner, config: SFTStageConfig, dataset: Artifact, then: EvaluateStageConfig
) -> StageResult:
    """Supervised rows to a `policy`: sharded weights, optimizer, and the tokenizer beside them."""
    after = stage_request(then, run.seed, dataset=dataset)
    return run.run(stage_request(config, run.seed, after, dataset=dataset))


def rl_round(
    run: StageRunner,
    config: RLRoundStageConfig,
    dataset: Artifact,
    policy: Artifact | None,
    reference: Artifact | None,
    then: EvaluateStageConfig,
) -> StageResult:
    """One round of RL, `policy` to `policy`; without one it starts from the model itself.

    The reference, the policy that RL started from or the round does, is an input only where a KL
    needs it.
    """
    reference = policy if config.rl.refresh_reference else reference
    reference = reference if config.rl.algorithm.needs_reference else None
    after = stage_request(then, run.seed, dataset=dataset)
    return run.run(
        stage_request(config, run.seed, after, dataset=dataset, policy=policy, reference=reference)
    )


def merge(
    run: StageRunner,
    config: MergeStageConfig,
    policy: Artifact,
    dataset: Artifact,
    then: EvaluateStageConfig,
) -> StageResult:
    """A policy to a `model` that `AutoModelForCausalLM.from_pretrained` loads."""
    after = stage_request(then, run.seed, dataset=dataset)
    return run.run(stage_request(config, run.seed, after, policy=policy))


def evaluate(
    run: StageRunner,
    config: EvaluateStageConfig,
    dataset: Artifact,
    *,
    policy: Artifact | None = None,
    model: Artifact | None = None,
) -> StageResult:
    """A policy, or a model as a user would load it, to an `evaluation`: every text, pass@k."""
    return run.run(stage_request(config, run.seed, dataset=dataset, policy=policy, model=model))


def promote(
    run: StageRunner,
    config: PromoteStageConfig,
    evaluation: Artifact,
    model: Artifact,
    *,
    incumbent: Artifact | None = None,
    incumbent_evaluation: Artifact | None = None,
) -> StageResult:
    """Scores to a `promotion`: the decision which alias the model may bear, and why.

    The incumbent bears the alias now; its scores are on the same problems. Whoever sees the
    promotion committed first on a tracking server registers the model there.
    """
    scores = {"evaluation": evaluation, "incumbent_evaluation": incumbent_evaluation}
    models = {"model": model, INCUMBENT: incumbent}
    return run.run(stage_request(config, run.seed, **scores, **models))
