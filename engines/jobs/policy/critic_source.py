"""Where a critic's first weights come from. Only a round of RL reads this: SFT has no critic."""

import shutil
from pathlib import Path

from engines.data.read.tokenizer import check_same_tokens
from engines.jobs.policy.files import CHECKPOINT_DIR, HF_DIR
from engines.training.backends.merging import merge_checkpoint
from engines.training.roles import CRITIC, ModelSource, role_checkpoint

MAX_SHARD_BYTES = 2**30
"""Of weights that are written out for a critic."""


def critic_source(
    policy: ModelSource,
    policy_dir: Path | None,
    work_dir: Path,
    reward_model: ModelSource | None = None,
) -> ModelSource:
    """The first weights of a critic: those of the critic before, else a reward model's or policy's.

    A policy's checkpoint has no head for values, and may be of any layout: its weights are written
    out once, an adapter merged in, and the head that they lack begins at 0.

    Args:
        policy: that the round starts with.
        policy_dir: its artifact; None where it is a Hugging Face directory.
        work_dir: where the weights are put; the same bytes in every attempt.
        reward_model: what the critic of the first round starts as, with its head; None: the policy.

    Returns:
        A checkpoint of a critic, or a Hugging Face directory.

    Raises:
        ConfigError: the reward model's tokens are not the policy's.
    """
    if policy_dir is not None:
        before = role_checkpoint(policy_dir / CHECKPOINT_DIR, CRITIC)
        if before.exists():
            # The shape is that of the critic's own first weights.
            like = policy_dir / HF_DIR if reward_model is None else reward_model.hf_dir
            return ModelSource(like, before)
    if reward_model is not None:
        check_same_tokens(policy.hf_dir, reward_model.hf_dir, "rl.critic.start", "a reward model")
        return reward_model
    if policy_dir is None:
        return policy
    made = work_dir / "initial_critic"
    shutil.rmtree(made, ignore_errors=True)
    merge_checkpoint(policy_dir, made, "float32", MAX_SHARD_BYTES)
    return ModelSource(made)
