"""Every stage: what it needs, and the artifact that it yields.

A policy's evaluation can be told as `then`: the process that made the policy runs it, and what is
asked for it later is done.

Each takes whoever runs stages, its configuration and artifacts of the stages before, and is the
job `engines.jobs.<stage>`. The name of a parameter is the name by which the job knows it.
"""

from collections.abc import Mapping, Sequence

from engines.config.stages.data import HELD_OUT, PreprocessStageConfig
from engines.config.stages.final import (
    CompareStageConfig,
    EvaluateStageConfig,
    MergeStageConfig,
    PromoteStageConfig,
    SoupStageConfig,
)
from engines.config.stages.harness import HarnessStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
from infra.store.stage_spec import Artifact
from infra.tracking.promotion import INCUMBENT
from tasks.runner.identity import StageRequest, stage_request
from tasks.runner.run import StageResult, StageRunner

NOTHING_HELD_OUT: Mapping[str, Artifact] = {}
REWARD_MODEL = "reward.model"
"""The input by which a stage that scores knows the reward model, wherever it comes from."""


def preprocess(
    run: StageRunner,
    config: PreprocessStageConfig,
    held_out: Mapping[str, Artifact] = NOTHING_HELD_OUT,
) -> StageResult:
    """Raw data to a `dataset`: checked rows by split, and the tokenizer of a model made here.

    The datasets of suites, by name, are what its training rows must not hold.
    """
    inputs = {f"{HELD_OUT}{name}": problems for name, problems in held_out.items()}
    return run.run(stage_request(config, run.seed, **inputs))


def sft(
    run: StageRunner,
    config: SFTStageConfig,
    dataset: Artifact,
    then: EvaluateStageConfig | None = None,
) -> StageResult:
    """Supervised rows to a `policy`: sharded weights, optimizer, and the tokenizer beside them."""
    after = _evaluation(run, then, dataset, None) if then else None
    return run.run(stage_request(config, run.seed, after, dataset=dataset))


def reward_model(
    run: StageRunner, config: RewardModelStageConfig, dataset: Artifact, policy: Artifact | None
) -> StageResult:
    """Preference rows to a `reward_model`, a sequence classification model of one output.

    It starts from a policy's weights; without one from the model itself.
    """
    return run.run(stage_request(config, run.seed, dataset=dataset, policy=policy))


def preference(
    run: StageRunner,
    config: PreferenceStageConfig,
    dataset: Artifact,
    policy: Artifact | None,
    then: EvaluateStageConfig | None = None,
    reward_model: Artifact | None = None,
    pairs: Artifact | None = None,
) -> StageResult:
    """Preference rows, or `pairs` of self-play, to a `policy`.

    Without a policy it starts from the model itself. The reward model is for the evaluation of its
    policy alone.
    """
    after = _evaluation(run, then, dataset, reward_model) if then else None
    inputs = {"dataset": dataset, "policy": policy, "pairs": pairs}
    return run.run(stage_request(config, run.seed, after, **inputs))


def self_play(
    run: StageRunner,
    config: SelfPlayStageConfig,
    dataset: Artifact,
    policy: Artifact,
    reward_model: Artifact | None = None,
) -> StageResult:
    """Rows, and the `policy` that answers them, to `pairs` that preference training reads.

    The reward model is for pairs by reward.
    """
    judge = {REWARD_MODEL: reward_model if config.self_play.source == "best_worst" else None}
    return run.run(stage_request(config, run.seed, dataset=dataset, policy=policy, **judge))


def rl_round(
    run: StageRunner,
    config: RLRoundStageConfig,
    dataset: Artifact,
    policy: Artifact | None,
    reference: Artifact | None,
    then: EvaluateStageConfig | None = None,
    reward_model: Artifact | None = None,
) -> StageResult:
    """One round of RL, `policy` to `policy`; without one it starts from the model itself.

    The reference, the policy that RL started from or the round does, is an input only where a KL
    needs it.
    """
    reference = policy if config.rl.refresh_reference else reference
    reference = reference if config.rl.algorithm.needs_reference else None
    after = _evaluation(run, then, dataset, reward_model) if then else None
    inputs = {"dataset": dataset, "policy": policy, "reference": reference}
    judge = {REWARD_MODEL: reward_model}
    return run.run(stage_request(config, run.seed, after, **inputs, **judge))


def merge(
    run: StageRunner,
    config: MergeStageConfig,
    policy: Artifact,
    dataset: Artifact,
    then: EvaluateStageConfig | None = None,
    reward_model: Artifact | None = None,
) -> StageResult:
    """A policy to a `model` that `AutoModelForCausalLM.from_pretrained` loads."""
    after = _evaluation(run, then, dataset, reward_model) if then else None
    return run.run(stage_request(config, run.seed, after, policy=policy))


def soup(run: StageRunner, config: SoupStageConfig, models: Sequence[Artifact]) -> StageResult:
    """Several models to the `model` that is their mean."""
    inputs = {config.input_name(place): model for place, model in enumerate(models)}
    return run.run(stage_request(config, run.seed, **inputs))


def evaluate(
    run: StageRunner,
    config: EvaluateStageConfig,
    dataset: Artifact,
    *,
    policy: Artifact | None = None,
    model: Artifact | None = None,
    reward_model: Artifact | None = None,
) -> StageResult:
    """A policy, or a model as a user would load it, to an `evaluation`: every text, pass@k.

    Without either it is the model that the configuration names.
    """
    return run.run(_evaluation(run, config, dataset, reward_model, policy=policy, model=model))


def harness(
    run: StageRunner, config: HarnessStageConfig, model: Artifact | None = None
) -> StageResult:
    """A model as a user would load it, to an `evaluation` by tasks of lm-evaluation-harness.

    Without it, it is the model that the configuration names.
    """
    return run.run(stage_request(config, run.seed, model=model))


def compare(
    run: StageRunner, config: CompareStageConfig, evaluation: Artifact, against: Artifact
) -> StageResult:
    """Evaluations of two models on the same problems, to a `comparison`: is the first better?"""
    return run.run(stage_request(config, run.seed, evaluation=evaluation, against=against))


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


def _evaluation(
    run: StageRunner,
    config: EvaluateStageConfig,
    dataset: Artifact,
    reward_model: Artifact | None,
    **of: Artifact | None,
) -> StageRequest:
    """An evaluation of what is given, or of what the stage before it yields."""
    judge = {REWARD_MODEL: reward_model}
    return stage_request(config, run.seed, dataset=dataset, **judge, **of)
