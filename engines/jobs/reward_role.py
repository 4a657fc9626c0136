"""The role `reward` of a stage: where its weights are, and what asks it."""

from typing import Any

from torch import Tensor

from engines.checkpoint.model_directory import check_reward_model, resolve_model
from engines.config.algorithm import RewardConfig
from engines.config.training import TrainingConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.jobs.policy_stage import policy_tokenizer
from engines.jobs.runtime import JobContext
from engines.trainers.judges.reward_model import RewardModelJudge
from engines.training.roles import REWARD, ModelSource, RoleSpec
from engines.types import Readouts, TokenBatch
from infra.errors import ConfigError

REWARD_SECTION = "rl.reward"
MODEL_INPUT = "reward.model"
"""Input of a stage: the directory, where it is a local one."""


def reward_role(
    context: JobContext[Any], reward: RewardConfig, training: TrainingConfig
) -> RoleSpec | None:
    """The model that judges, checked.

    Args:
        context: of a stage that may be given its directory.
        reward: of the stage.
        training: backend, layout and numerics of the ranks that hold it.

    Returns:
        A frozen value model; None where nothing asks for one.

    Raises:
        ConfigError: the model cannot be used; names the field below `rl.reward.model`.
    """
    if reward.model is None:
        return None
    try:
        directory = context.optional_input(MODEL_INPUT) or resolve_model(reward.model)
        check_reward_model(directory, max_length=reward.model.max_length)
    except ConfigError as error:
        raise ConfigError(f"{REWARD_SECTION}.{error.path}", error.problem) from None
    return RoleSpec(
        ModelSource(directory),
        # An adapter is the policy's.
        training.model_copy(update={"lora": None}),
        optimizer=None,
        model_type="value_model",
    )


def reward_judge(
    reward: RewardConfig, role: RoleSpec | None, workers: WorkerGroup | None
) -> RewardModelJudge | None:
    """What the scorer asks.

    Args:
        reward: of the stage.
        role: of `reward_role`.
        workers: ranks that hold it.

    Returns:
        None where there is no such role.
    """
    if reward.model is None or role is None or workers is None:
        return None

    def behind(batch: TokenBatch) -> Tensor:
        found = workers.run(ModelWorker.infer, batch, Readouts(last_values=True), REWARD)
        if found.last_values_B is None:
            raise ValueError("a value model said nothing behind its sequences")
        return found.last_values_B

    tokenizer = policy_tokenizer(role.source.hf_dir, reward.model.chat_template)
    return RewardModelJudge(behind, tokenizer, reward.model.max_length)
