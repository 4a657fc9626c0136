"""The frozen models that score a policy's answers: reward model and judge.

`serve` adds the engines of a stage without training, with everything that scores their answers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.checkpoint.model_directory import (
    check_model_directory,
    check_reward_model,
    resolve_model,
    stated_context,
)
from engines.config.algorithm import RewardConfig
from engines.config.model import JudgeConfig, RewardModelConfig
from engines.config.stages.serving import ServingStageConfig
from engines.config.training import TrainingConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import FrozenModel, LaunchedEngines, replica_beside
from engines.controller.worker_group import WorkerGroup
from engines.jobs.process.policy import write_hf_files
from engines.jobs.process.policy_stage import policy_tokenizer, queueing
from engines.jobs.process.runtime import JobContext
from engines.jobs.serving.model import ServedModel, ServedOnDemand, replica_of
from engines.judges.asking import NO_JUDGES, GenerativeJudge, Judges, RewardModelJudge
from engines.rewards.scorer import RewardScorer
from engines.trainers.prompts import derive_seed, sampling_params
from engines.trainers.scoring import CompletionScorer
from engines.training.spec import REWARD, ModelSource, RoleSpec
from engines.types import Readouts, TokenBatch
from infra.names import renamed_sections

JUDGE = "judge"
"""Name of the judge among the engines beside the policy's, and of its directory."""
MAX_READ_TOKENS = 2048
"""Default of the longest conversation, in tokens, that a reward model reads."""


def reward_role(
    context: JobContext[Any], model: RewardModelConfig | None, training: TrainingConfig
) -> RoleSpec | None:
    """Return the checked reward model as a frozen value model; None if `model` is None."""
    if model is None:
        return None
    with renamed_sections({"model": "rl.reward.model"}):
        directory = context.optional_input("reward.model") or resolve_model(model, model.max_length)
        check_reward_model(directory, max_length=model.max_length)
    return RoleSpec(
        ModelSource(directory),
        # An adapter belongs to the policy.
        training.model_copy(update={"lora": None}),
        optimizer=None,
        model_type="value_model",
    )


def judge_source(
    context: JobContext[Any], judge: JudgeConfig | None, like: ReplicaSpec, *, embedded: bool
) -> FrozenModel | None:
    """Return the checked judge with its engines; None if `judge` is None."""
    if judge is None:
        return None
    with renamed_sections({"model": "rl.reward.judge"}):
        weights_dir = context.optional_input("reward.judge") or resolve_model(
            judge, judge.max_length
        )
        check_model_directory(weights_dir, max_length=judge.max_length)
        serving_dir = context.attempt_dir / JUDGE
        write_hf_files(weights_dir, serving_dir, judge.chat_template)
    return FrozenModel(
        replica_beside(like, serving_dir, judge.num_replicas, judge.options, embedded=embedded),
        weights_dir,
    )


@contextmanager
def asked_judges(
    reward: RewardConfig,
    seed: int,
    role: RoleSpec | None,
    workers: WorkerGroup | None,
    judge: FrozenModel | None,
    engines: LaunchedEngines | None,
) -> Iterator[Judges]:
    """Yield the configured reward model and judge; the judge's engines have its weights then."""
    with ExitStack() as stack:
        reward_model = generative = None
        if reward.model is not None and role is not None and workers is not None:
            reward_model = _reward_model(reward.model, role, workers)
        if reward.judge is not None and judge is not None and engines is not None:
            service = stack.enter_context(judge.served_by(engines))
            generative = GenerativeJudge(
                service.generate,
                policy_tokenizer(judge.replica.serving_dir),
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
            raise ValueError("the value model returned no last_values")
        return found.last_values_B

    return RewardModelJudge(
        behind,
        policy_tokenizer(role.source.hf_dir, model.chat_template),
        longest_read(model, role.source.hf_dir),
    )


def longest_read(model: RewardModelConfig, directory: Path) -> int:
    """Return the longest conversation in tokens that a reward model scores.

    This is the recipe's value, else the model's context but at most `MAX_READ_TOKENS`.
    """
    if model.max_length is not None:
        return model.max_length
    return min(MAX_READ_TOKENS, stated_context(directory) or MAX_READ_TOKENS)


def question_seed(seed: int, text: str) -> int:
    """Return the seed of a question to a judge; it depends only on the run seed and the text."""
    return derive_seed(seed, f"judge/{text}")


def serve(
    context: JobContext[ServingStageConfig],
    stack: ExitStack,
    served: ServedModel,
    rewards: RewardScorer,
) -> tuple[ServedOnDemand, CompletionScorer]:
    """Return the engines that serve a model, and the scorer of its answers.

    The engines start with the first request; with a judge or reward model, all start here.
    Create `rewards` before `load_served`, which sets torch up. `stack` closes what starts.
    """
    config, seed = context.config, context.spec.seed
    replica = replica_of(config, served, context.attempt_dir)
    # The reward model is on one rank, whatever layout trained the policy.
    role = reward_role(
        context,
        config.reward.model,
        TrainingConfig(num_threads=config.num_threads, dtype=config.dtype),
    )
    judge = judge_source(context, config.reward.judge, replica, embedded=config.driver_computes)
    ranks = role and WorkerSpec(
        roles={REWARD: role},
        serving_dir=role.source.hf_dir,
        rollout=None,
        temperature=1.0,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=seed,
    )
    engines = ServedOnDemand(
        served,
        lambda: launch_served_model(
            replica,
            ranks,
            judge.replica if judge else None,
            queueing(context, config.hardware),
        ),
        stack,
    )
    judges = NO_JUDGES
    if role or judge:
        launched = engines.launched
        judges = stack.enter_context(
            asked_judges(config.reward, seed, role, launched.beside, judge, launched.judge)
        )
    return engines, CompletionScorer(rewards, policy_tokenizer(served.hf_dir), judges=judges)
