"""Job `evaluate`: a policy or a model, and the held-out rows, to scores.

Promises: a policy is read from its committed checkpoint, whatever backend and number of ranks
wrote it, so it scores what the model merged from it scores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from engines.checkpoint.model_directory import (
    check_model_directory,
    resolve_model,
    stated_context,
)
from engines.config.stages.final import EvaluateStageConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import WorkerSpec
from engines.controller.replica import ReplicaSpec
from engines.data.read.dataset import load_dataset
from engines.jobs.judges import asked_judges, judge_source, reward_role, stored_tensors
from engines.jobs.policy.files import HF_DIR, trained_steps, write_hf_files
from engines.jobs.policy_stage import local_reward, policy_tokenizer, prompts_within, queueing
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.runtime import JobContext, JobOutput, run_job
from engines.rewards.mixture import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.rollout.service import RolloutService
from engines.trainers.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    Generate,
    by_source,
    told_sources,
)
from engines.trainers.evaluation.files import write_evaluation
from engines.trainers.scoring import CompletionScorer
from engines.training.backends.merging import policy_weights
from engines.training.roles import REWARD, RoleSpec
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError, DeadlineError

EVALUATION_DEADLINE_S = 7200.0
"""An evaluation that answered nothing for so long hangs."""


def evaluate(context: JobContext[EvaluateStageConfig]) -> JobOutput:
    """Serve the model, answer every problem, judge the answers."""
    config, spec = context.config, context.spec
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
                rows,
                tokenizer,
                served.max_length,
                config.evaluation.answer_length,
            )
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
            judge = judge_source(
                context, config.reward.judge, replica, embedded=config.driver_computes
            )
            launched = launch_served_model(
                replica,
                None if role is None else _reward_worker(config, role, spec.seed),
                judge.replica if judge else None,
                queueing(context, config.hardware),
            )
            stack.enter_context(closing(launched.pool))
            if launched.reward_model is not None:
                stack.enter_context(closing(launched.reward_model))
            engines = launched.engines
            service = stack.enter_context(closing(engines.service()))
            service.sync(
                engines.new_transport, lambda to: to.send(served.weights()), served.num_steps
            )
            judges = stack.enter_context(
                asked_judges(
                    config.reward, spec.seed, role, launched.reward_model, judge, launched.judge
                )
            )
        scorer = CompletionScorer(rewards, tokenizer, judges=judges)
        evaluator = Evaluator(config.evaluation, prompts, scorer, spec.seed)
        evaluation = _run(context, partial(_finished, service), evaluator)
    metrics = evaluation.metrics
    write_evaluation(evaluation, context.output_dir)
    told = metrics | {
        f"{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
    }
    context.journal.metrics(served.num_steps, {f"val-core/{k}": v for k, v in told.items()})
    return JobOutput("evaluation", metrics | told_sources(evaluation))


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


@dataclass(frozen=True)
class ServedModel:
    """What is evaluated.

    Attributes:
        hf_dir: its configuration and tokenizer.
        weights: by hub name, streamed; called again for an engine that starts late.
        max_length: context in tokens, prompt and answer together.
        num_steps: trainer steps behind it; 0 of a model directory, which does not say.
    """

    hf_dir: Path
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    max_length: int
    num_steps: int = 0


def served_model(context: JobContext[EvaluateStageConfig]) -> ServedModel:
    """The input `policy`, or the input `model`, or the model of nobody's making."""
    policy_dir = context.optional_input("policy")
    if policy_dir is not None:
        num_steps = trained_steps(policy_dir).num_steps
        weights, hf_dir = partial(policy_weights, policy_dir), policy_dir / HF_DIR
        return ServedModel(hf_dir, weights, context_length(hf_dir), num_steps)
    model = context.config.model
    if model is None:
        model_dir = context.input("model")
        check_model_directory(model_dir)
        return ServedModel(model_dir, partial(stored_tensors, model_dir), context_length(model_dir))
    model_dir = context.optional_input("model") or resolve_model(model, max_length=None)
    check_model_directory(model_dir)
    serving_dir = context.attempt_dir / HF_DIR
    write_hf_files(model_dir, serving_dir, model.chat_template)
    weights = partial(stored_tensors, model_dir)
    return ServedModel(serving_dir, weights, context_length(model_dir))


def _finished(
    service: RolloutService, requests: Sequence[RolloutRequest]
) -> list[list[Completion]]:
    """Answers to every request; an accuracy over those that came in time would be another."""
    rows = service.generate(requests)
    num_aborted = sum(c.finish_reason == "abort" for row in rows for c in row)
    if num_aborted:
        raise DeadlineError(f"{num_aborted} answers", service.timeout_s)
    return rows


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


def context_length(model_dir: Path) -> int:
    """Tokens that the model was built for, prompt and answer together."""
    length = stated_context(model_dir)
    if length is None:
        raise ConfigError(
            "model.path",
            f"{model_dir} does not say how many tokens it was built for; need "
            "max_position_embeddings in its config.json; add it",
        )
    return length


JOB = (EvaluateStageConfig, evaluate)

if __name__ == "__main__":
    run_job(*JOB)
