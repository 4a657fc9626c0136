"""The named models of a run, and what each is built from. Plain data: it travels.

A trainer is a set of roles and a loss: GRPO has a policy and perhaps a reference, PPO a critic too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.spec import ModelType

RoleName = Literal["policy", "reference", "critic", "reward", "teacher"]

POLICY: RoleName = "policy"
"""The model that is trained and sampled from; every worker has it."""
REFERENCE: RoleName = "reference"
"""The frozen model that the policy stays near to."""
CRITIC: RoleName = "critic"
"""A value model of what the policy's answers will earn."""
REWARD: RoleName = "reward"
"""A frozen value model; what it says behind the last token of a conversation is its score."""
TEACHER: RoleName = "teacher"
"""A frozen model whose distributions the policy learns."""

ROLES_DIR = "roles"
"""In a checkpoint: directories of the roles beside the policy, whose files stand at the top."""


def role_checkpoint(path: Path, role: RoleName) -> Path:
    """Where a checkpoint keeps a role."""
    return path if role == POLICY else path / ROLES_DIR / role


@dataclass(frozen=True)
class ModelSource:
    """Weights on disk.

    Attributes:
        hf_dir: Hugging Face directory; holds the weights unless there is a checkpoint.
        checkpoint_dir: sharded checkpoint that holds them instead.
    """

    hf_dir: Path
    checkpoint_dir: Path | None = None


@dataclass(frozen=True)
class RoleSpec:
    """One model of a rank.

    Attributes:
        source: its first weights.
        training: backend and numerics. All roles of a rank have one layout.
        optimizer: None for a frozen model.
        model_type: `value_model` has a head of one number per token; the source may lack it.
        restore_optimizer: continue the optimizer of the source's checkpoint.
        total_num_steps: optimizer steps the schedule spans; a constant one needs none.
    """

    source: ModelSource
    training: TrainingConfig
    optimizer: OptimizerConfig | None = None
    model_type: ModelType = "language_model"
    restore_optimizer: bool = False
    total_num_steps: int = 0
