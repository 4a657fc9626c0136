"""The user's files and directories that several stages read."""

from dataclasses import dataclass
from pathlib import Path

from engines.config.algorithm import RewardConfig
from engines.config.base import local_path
from engines.config.distillation import DistillationConfig
from engines.config.model import ModelConfig

REWARD_MODEL = "reward.model"
"""Input name of the reward model, wherever it comes from."""


@dataclass(frozen=True)
class ExternalInput:
    """Something from outside the pipeline that a stage reads.

    Attributes:
        setting: recipe setting that names it, for error messages.
        is_script: a Python file; it counts with the modules beside it that it imports.
    """

    path: Path
    setting: str
    is_script: bool = False


def model_input(model: ModelConfig) -> dict[str, ExternalInput]:
    """Return the user's model directory, if it is local."""
    path = local_path(model.path)
    return {"model": ExternalInput(path, "model.path")} if path else {}


def reward_inputs(reward: RewardConfig) -> dict[str, ExternalInput]:
    """Return the user's reward files and the local directories of the scoring models."""
    files = {
        path.removeprefix("rl."): ExternalInput(part.file, f"{path}.function", is_script=True)
        for path, part in reward.parts.items()
        if part.file
    }
    models = {
        f"reward.{name}": ExternalInput(directory, f"rl.reward.{name}.path")
        for name, model in reward.models.items()
        if (directory := local_path(model.path))
    }
    return {**files, **models}


def teacher_input(distillation: DistillationConfig | None) -> dict[str, ExternalInput]:
    """Return the directory of the user's teacher, if it is local."""
    path = local_path(distillation.path) if distillation else None
    return {"teacher": ExternalInput(path, "rl.distillation.path")} if path else {}
