"""Job `evaluate`: a policy or a model, and the held-out rows, to scores.

Promises: answers that another evaluation of the same model kept are judged, not sampled again.
"""

from contextlib import ExitStack

from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import WorkerSpec
from engines.controller.replica import ReplicaSpec
from engines.data.read.dataset import load_dataset
from engines.jobs.evaluation.answers import KeptAnswers
from engines.jobs.evaluation.served_model import ServedModel, ServedOnDemand, served_model
from engines.jobs.judges import asked_judges, judge_source, reward_role
from engines.jobs.policy.stage import local_reward, policy_tokenizer, prompts_within, queueing
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.runtime import JobContext, JobOutput, run_job
from engines.rewards.mixture import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    Generate,
    by_source,
    told_sources,
)
from engines.trainers.evaluation.files import write_evaluation
from engines.trainers.judges.asking import NO_JUDGES, Judges
from engines.trainers.scoring import CompletionScorer
from engines.training.roles import REWARD, RoleSpec

EVALUATION_DEADLINE_S = 7200.0
"""An evaluation that answered nothing for so long hangs."""


def evaluate(context: JobContext[EvaluateStageConfig]) -> JobOutput:
    """Have every problem answered, unless it was before, and judge the answers."""
    config = context.config
    with ExitStack() as stack:
        rewards = stack.enter_context(RewardScorer(local_reward(context, config.reward)))
        with context.clock("load"):
            prepare_torch(
                config.hardware,
                config.num_threads,
                context.journal.log,
                computes=config.driver_computes,
            )
            served = served_model(context)
            tokenizer = policy_tokenizer(served.hf_dir)
            rows = load_dataset(context.input("dataset")).evaluation_rows()
            check_data_sources(config.reward, (row.data_source for row in rows))
            prompts = prompts_within(
                rows, tokenizer, served.max_length, config.evaluation.answer_length
            )
            engines, judges = _engines(context, served, stack)
        scorer = CompletionScorer(rewards, tokenizer, judges=judges)
        evaluator = Evaluator(config.evaluation, prompts, scorer, context.spec.seed)
        answers = KeptAnswers(context, engines.generate)
        evaluation = _run(context, answers, evaluator)
    if answers.num_found:
        context.journal.log(f"{answers.num_found} answers were there already")
    metrics = evaluation.metrics
    write_evaluation(evaluation, context.output_dir)
    told = metrics | {
        f"{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
    }
    context.journal.metrics(served.num_steps, {f"val-core/{k}": v for k, v in told.items()})
    return JobOutput("evaluation", metrics | told_sources(evaluation))


def _engines(
    context: JobContext[EvaluateStageConfig], served: ServedModel, stack: ExitStack
) -> tuple[ServedOnDemand, Judges]:
    """What samples the answers, and the models that judge them, which start at once."""
    config, spec = context.config, context.spec
    replica = ReplicaSpec(
        serving_dir=served.hf_dir,
        rollout=config.rollout,
        dtype=config.rollout.dtype or config.dtype,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        num_threads=config.num_threads,
        log_dir=context.attempt_dir,
    )
    role = reward_role(context, config.reward.model, _of_reward_model(config))
    judge = judge_source(context, config.reward.judge, replica, embedded=config.driver_computes)
    engines = ServedOnDemand(
        served,
        lambda: launch_served_model(
            replica,
            None if role is None else _reward_worker(config, role, spec.seed),
            judge.replica if judge else None,
            queueing(context, config.hardware),
        ),
        stack,
    )
    if role is None and judge is None:
        return engines, NO_JUDGES
    launched = engines.launched
    asked = asked_judges(
        config.reward, spec.seed, role, launched.reward_model, judge, launched.judge
    )
    return engines, stack.enter_context(asked)


def _of_reward_model(config: EvaluateStageConfig) -> TrainingConfig:
    """How the reward model of an evaluation is held: by one rank, whatever trained the policy."""
    return TrainingConfig(num_threads=config.num_threads, dtype=config.dtype)


def _reward_worker(config: EvaluateStageConfig, role: RoleSpec, seed: int) -> WorkerSpec:
    return WorkerSpec(
        roles={REWARD: role},
        serving_dir=role.source.hf_dir,
        rollout=None,
        temperature=1.0,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=seed,
    )


def _run(context: JobContext, generate: Generate, evaluator: Evaluator) -> Evaluation:
    """Evaluate what is being served, with the time counted and the result told."""
    context.heartbeat.enter("evaluate", EVALUATION_DEADLINE_S)

    def report(done: int, total: int) -> None:
        context.heartbeat.tick()
        context.journal.progress(done, total, f"evaluated {done} of {total} problems")

    with context.clock("evaluate"):
        evaluation = evaluator.run(generate, report)
    metrics = evaluation.metrics
    if "accuracy" in metrics:
        context.journal.log(
            f"accuracy {metrics['accuracy']:.1%} "
            f"[{metrics['accuracy_low']:.1%}, {metrics['accuracy_high']:.1%}] on "
            f"{metrics['num_problems']:.0f} held-out problems"
        )
    has_votes = any(name.startswith("maj@") for name in metrics)
    if any(name.startswith("avg@") for name in metrics) and not has_votes:
        context.journal.log("no maj@k: the reward does not say of every answer what it read (pred)")
    return evaluation


JOB = (EvaluateStageConfig, evaluate)

if __name__ == "__main__":
    run_job(*JOB)
