"""The first weights of a critic, in a round of RL."""

import shutil
from pathlib import Path

from engines.data.read.tokenizer import check_same_tokens
from engines.jobs.policy.files import CHECKPOINT_DIR, HF_DIR
from engines.training.backends.merging import merge_checkpoint
from engines.training.spec import CRITIC, ModelSource, role_checkpoint

MAX_SHARD_BYTES = 2**30
"""Maximum size of a file of weights written for a critic."""


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
