"""Where a critic's first weights come from. Only a round of RL reads this: SFT has no critic."""

import shutil
from pathlib import Path

from engines.jobs.policy_files import CHECKPOINT_DIR, HF_DIR
from engines.training.backends.merging import merge_checkpoint
from engines.training.roles import CRITIC, ModelSource, role_checkpoint

MAX_SHARD_BYTES = 2**30
"""Of weights that are written out for a critic."""


def critic_source(policy: ModelSource, policy_dir: Path | None, work_dir: Path) -> ModelSource:
    """The first weights of a critic: those of the critic before, else the policy's.

    A policy's checkpoint has no head for values, and may be of any layout: its weights are written
    out once, an adapter merged in, and the head that they lack begins at 0.

    Args:
        policy: that the round starts with.
        policy_dir: its artifact; None where it is a Hugging Face directory.
        work_dir: where the weights are put; the same bytes in every attempt.

    Returns:
        A checkpoint of a critic, or a Hugging Face directory.
    """
    if policy_dir is None:
        return policy
    before = role_checkpoint(policy_dir / CHECKPOINT_DIR, CRITIC)
    if before.exists():
        return ModelSource(policy_dir / HF_DIR, before)
    made = work_dir / "initial_critic"
    shutil.rmtree(made, ignore_errors=True)
    merge_checkpoint(policy_dir, made, "float32", MAX_SHARD_BYTES)
    return ModelSource(made)
