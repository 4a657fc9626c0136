"""Where a round's teacher and critic get their first weights."""

from pathlib import Path

from engines.checkpoint.model_directory import (
    resolve_model,
)
from engines.checkpoint.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import DistillationConfig
from engines.config.rules.algorithm import num_spare_tokens
from engines.data.read.tokenizer import check_same_tokens
from engines.jobs.process.exported_policy import exported_policy
from engines.jobs.process.policy import CHECKPOINT_DIR, HF_DIR
from engines.training.spec import CRITIC, ModelSource, role_checkpoint
from infra.names import renamed_sections


def teacher_source(
    config: DistillationConfig,
    given: Path | None,
    policy: ModelSource,
    max_length: int,
    rollout_engine: str,
) -> ModelSource:
    """Return the directory of the teacher's weights; a ConfigError names the bad field.

    `given` is a local directory, None for the hub. `max_length` is the policy's context.
    """
    with renamed_sections({"model": TEACHER_SECTION}):
        directory = given or resolve_model(config, max_length)
    check_teacher(
        config, directory, policy.hf_dir, max_length, num_spare_tokens(config, rollout_engine)
    )
    return ModelSource(directory)


def critic_source(
    policy: ModelSource,
    policy_dir: Path | None,
    work_dir: Path,
    reward_model: ModelSource | None = None,
) -> ModelSource:
    """Return the first weights of a critic: the last critic's, else a reward model's or policy's.

    A policy's checkpoint has no value head and may have any layout: its weights are exported once,
    with an adapter merged in, and the missing head starts at 0.

    Args:
        policy_dir: artifact of the policy; None if it is a Hugging Face directory.
        work_dir: directory for exported weights.
        reward_model: first weights, with head, of the first round's critic; its tokens must be
            those of the policy (ConfigError). None: the policy.
    """
    if policy_dir is not None:
        before = role_checkpoint(policy_dir / CHECKPOINT_DIR, CRITIC)
        if before.exists():
            # The critic has the shape of its own first weights.
            return ModelSource(
                policy_dir / HF_DIR if reward_model is None else reward_model.hf_dir, before
            )
    if reward_model is not None:
        check_same_tokens(policy.hf_dir, reward_model.hf_dir, "rl.critic.start", "a reward model")
        return reward_model
    if policy_dir is None:
        return policy
    return exported_policy(policy_dir, work_dir / "initial_critic")
