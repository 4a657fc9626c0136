"""The models that judge the answers of a stage: their weights, and what asks them."""

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
from engines.config.training import TrainingConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import LaunchedEngines
from engines.controller.worker_group import WorkerGroup
from engines.jobs.policy.files import write_hf_files
from engines.jobs.policy.stage import policy_tokenizer
from engines.jobs.process.runtime import JobContext
from engines.jobs.serving.frozen import FrozenModel, replica_beside
from engines.trainers.judges.asking import Judges
from engines.trainers.judges.generative import GenerativeJudge
from engines.trainers.judges.reward_model import RewardModelJudge
from engines.trainers.samples.params import sampling_params
from engines.trainers.samples.prompts import derive_seed
from engines.training.roles import REWARD, ModelSource, RoleSpec
from engines.types import Readouts, TokenBatch
from infra.section_names import renamed_sections

JUDGE = "judge"
"""What its engines are called among those beside the policy's."""
JUDGE_DIR = "judge"
"""Below the attempt: configuration and tokenizer of a judge, with every token that ends a text."""
MAX_READ_TOKENS = 2048
"""Of a conversation, by a reward model that nobody gave a length."""


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
    with renamed_sections({"model": "rl.reward.model"}):
        directory = context.optional_input("reward.model") or resolve_model(model, model.max_length)
        check_reward_model(directory, max_length=model.max_length)
    return RoleSpec(
        ModelSource(directory),
        # An adapter is the policy's.
        training.model_copy(update={"lora": None}),
        optimizer=None,
        model_type="value_model",
    )


def judge_source(
    context: JobContext[Any], judge: JudgeConfig | None, like: ReplicaSpec, *, embedded: bool
) -> FrozenModel | None:
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
    with renamed_sections({"model": "rl.reward.judge"}):
        weights_dir = context.optional_input("reward.judge") or resolve_model(
            judge, judge.max_length
        )
        check_model_directory(weights_dir, max_length=judge.max_length)
        serving_dir = context.attempt_dir / JUDGE_DIR
        write_hf_files(weights_dir, serving_dir, judge.chat_template)
    replica = replica_beside(
        like, serving_dir, judge.num_replicas, judge.options, embedded=embedded
    )
    return FrozenModel(replica, weights_dir)


@contextmanager
def asked_judges(
    reward: RewardConfig,
    seed: int,
    role: RoleSpec | None,
    workers: WorkerGroup | None,
    judge: FrozenModel | None,
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
            service = stack.enter_context(judge.served_by(engines))
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
    return RewardModelJudge(behind, tokenizer, longest_read(model, role.source.hf_dir))


def longest_read(model: RewardModelConfig, directory: Path) -> int:
    """Tokens of the longest conversation that a reward model scores.

    Args:
        model: of the stage.
        directory: its files.

    Returns:
        What the recipe says, else what the model was built for, at most `MAX_READ_TOKENS`.
    """
    if model.max_length is not None:
        return model.max_length
    return min(MAX_READ_TOKENS, stated_context(directory) or MAX_READ_TOKENS)


def question_seed(seed: int, text: str) -> int:
    """Of what a judge is asked: the same whenever and beside whatever it is asked."""
    return derive_seed(seed, f"judge/{text}")
