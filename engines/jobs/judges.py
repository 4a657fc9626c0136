"""The engines of a stage that trains nothing, and the models that judge a stage's answers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from engines.checkpoint.model_directory import (
    check_model_directory,
    check_reward_model,
    model_of_section,
    resolve_model,
)
from engines.config.algorithm import RewardConfig
from engines.config.model import JudgeConfig, RewardModelConfig
from engines.config.stages.serving import ServingStageConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import LaunchedEngines
from engines.controller.worker_group import WorkerGroup
from engines.jobs.policy.files import write_hf_files
from engines.jobs.policy.served_model import ServedModel, stored_tensors
from engines.jobs.policy_stage import policy_tokenizer, queueing
from engines.jobs.runtime import JobContext
from engines.rewards.scorer import RewardScorer
from engines.rollout.service import RolloutService
from engines.trainers.judges.asking import Judges
from engines.trainers.judges.generative import GenerativeJudge
from engines.trainers.judges.reward_model import RewardModelJudge
from engines.trainers.prompts import derive_seed
from engines.trainers.sampling import sampling_params
from engines.trainers.scoring import CompletionScorer
from engines.training.roles import REWARD, ModelSource, RoleSpec
from engines.types import Completion, Readouts, RolloutRequest, TokenBatch
from infra.errors import DeadlineError

Config = TypeVar("Config", bound=ServingStageConfig)

JUDGE_DIR = "judge"
"""Below the attempt: configuration and tokenizer of a judge, with every token that ends a text."""


def reward_role(
    context: JobContext[Any], model: RewardModelConfig | None, training: TrainingConfig
) -> RoleSpec | None:
    """The reward model, checked.

    Args:
        context: of a stage that may be given its directory.
        model: of the stage; None where nothing asks for one.
        training: backend, layout and numerics of the ranks that hold it.

    Returns:
        A frozen value model.

    Raises:
        ConfigError: the model cannot be used; names the field below `rl.reward.model`.
    """
    if model is None:
        return None
    with model_of_section("rl.reward.model"):
        directory = context.optional_input("reward.model") or resolve_model(model, model.max_length)
        check_reward_model(directory, max_length=model.max_length)
    return RoleSpec(
        ModelSource(directory),
        # An adapter is the policy's.
        training.model_copy(update={"lora": None}),
        optimizer=None,
        model_type="value_model",
    )


@dataclass(frozen=True)
class JudgeSource:
    """A judge on disk.

    Attributes:
        replica: engines that serve it.
        weights_dir: holds its weights.
    """

    replica: ReplicaSpec
    weights_dir: Path


def judge_source(
    context: JobContext[Any], judge: JudgeConfig | None, like: ReplicaSpec, *, embedded: bool
) -> JudgeSource | None:
    """The judge, checked, and engines of the kind that serves the policy.

    Args:
        context: of a stage that may be given its directory.
        judge: of the stage; None where nothing asks for one.
        like: of the policy.
        embedded: the policy's engine is in this process, and so is the judge's.

    Returns:
        What to launch.

    Raises:
        ConfigError: the model cannot be used; names the field below `rl.reward.judge`.
    """
    if judge is None:
        return None
    with model_of_section("rl.reward.judge"):
        weights_dir = context.optional_input("reward.judge") or resolve_model(
            judge, judge.max_length
        )
        check_model_directory(weights_dir, max_length=judge.max_length)
        serving_dir = context.attempt_dir / JUDGE_DIR
        write_hf_files(weights_dir, serving_dir, judge.chat_template)
    changes = {
        "placement": "colocated" if embedded else "disaggregated",
        "num_replicas": judge.num_replicas,
        "options": judge.options,
        "openai_endpoint": False,
    }
    replica = replace(
        like,
        serving_dir=serving_dir,
        rollout=like.rollout.model_copy(update=changes),
        log_dir=serving_dir,
        shares_devices=False,
        adapter=None,
    )
    return JudgeSource(replica, weights_dir)


@contextmanager
def asked_judges(
    reward: RewardConfig,
    seed: int,
    role: RoleSpec | None,
    workers: WorkerGroup | None,
    judge: JudgeSource | None,
    engines: LaunchedEngines | None,
) -> Iterator[Judges]:
    """Scope in which the judges can be asked; a judge's weights are sent at its start.

    Args:
        reward: of the stage.
        seed: of the run.
        role: of `reward_role`.
        workers: ranks that hold it.
        judge: of `judge_source`.
        engines: that serve it.

    Yields:
        Judges: what the scorer asks.
    """
    with ExitStack() as stack:
        reward_model = generative = None
        if reward.model is not None and role is not None and workers is not None:
            reward_model = _reward_model(reward.model, role, workers)
        if reward.judge is not None and judge is not None and engines is not None:
            service = stack.enter_context(closing(engines.service()))
            service.sync(
                engines.new_transport, lambda to: to.send(stored_tensors(judge.weights_dir)), 0
            )
            tokenizer = policy_tokenizer(judge.replica.serving_dir)
            generative = GenerativeJudge(
                service.generate,
                tokenizer,
                reward.judge,
                sampling_params(reward.judge.sampling),
                partial(question_seed, seed),
            )
        yield Judges(reward_model, generative)


def _reward_model(
    model: RewardModelConfig, role: RoleSpec, workers: WorkerGroup
) -> RewardModelJudge:
    def behind(batch: TokenBatch) -> Tensor:
        found = workers.run(ModelWorker.infer, batch, Readouts(last_values=True), REWARD)
        if found.last_values_B is None:
            raise ValueError("a value model said nothing behind its sequences")
        return found.last_values_B

    tokenizer = policy_tokenizer(role.source.hf_dir, model.chat_template)
    return RewardModelJudge(behind, tokenizer, model.max_length)


def question_seed(seed: int, text: str) -> int:
    """Of what a judge is asked: the same whenever and beside whatever it is asked."""
    return derive_seed(seed, f"judge/{text}")


@dataclass(frozen=True)
class Serving:
    """Engines that answer, and what judges their answers.

    Attributes:
        service: over the engines.
        scorer: with the models that judge.
    """

    service: RolloutService
    scorer: CompletionScorer

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Answers to every request; a number over those that came in time would be another.

        Args:
            requests: with ids that differ.

        Returns:
            For each its completions.

        Raises:
            DeadlineError: one was aborted.
        """
        rows = self.service.generate(requests)
        num_aborted = sum(c.finish_reason == "abort" for row in rows for c in row)
        if num_aborted:
            raise DeadlineError(f"{num_aborted} answers", self.service.timeout_s)
        return rows


def serve(
    context: JobContext[Config], stack: ExitStack, served: ServedModel, rewards: RewardScorer
) -> Serving:
    """Start engines with a model's weights, and the models that judge.

    Args:
        context: of the job.
        stack: closes all of it.
        served: what answers.
        rewards: the reward function, started before torch was set up.

    Returns:
        Ready to answer.

    Raises:
        ConfigError: an engine cannot serve the model, or a judge cannot be used.
    """
    config, seed = context.config, context.spec.seed
    replica = ReplicaSpec(
        serving_dir=served.hf_dir,
        rollout=config.rollout,
        dtype=config.rollout.dtype or config.dtype,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        num_threads=config.num_threads,
        log_dir=context.attempt_dir,
    )
    # Held by one rank, whatever trained the policy.
    alone = TrainingConfig(num_threads=config.num_threads, dtype=config.dtype)
    role = reward_role(context, config.reward.model, alone)
    judge = judge_source(context, config.reward.judge, replica, embedded=config.driver_computes)
    launched = launch_served_model(
        replica,
        None if role is None else _reward_worker(config, role, seed),
        judge.replica if judge else None,
        queueing(context, config.hardware),
    )
    stack.enter_context(closing(launched.pool))
    if launched.reward_model is not None:
        stack.enter_context(closing(launched.reward_model))
    engines = launched.engines
    service = stack.enter_context(closing(engines.service()))
    service.sync(engines.new_transport, lambda to: to.send(served.weights()), served.num_steps)
    judges = stack.enter_context(
        asked_judges(config.reward, seed, role, launched.reward_model, judge, launched.judge)
    )
    scorer = CompletionScorer(rewards, policy_tokenizer(served.hf_dir), judges=judges)
    return Serving(service, scorer)


def _reward_worker(config: ServingStageConfig, role: RoleSpec, seed: int) -> WorkerSpec:
    return WorkerSpec(
        roles={REWARD: role},
        serving_dir=role.source.hf_dir,
        rollout=None,
        temperature=1.0,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=seed,
    )
