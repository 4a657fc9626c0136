"""Checks from `config.json` that the engines of a recipe support its local models.

Promises: what is refused here the engine itself would refuse, by the same function, or compute
wrongly. Does not promise that an engine accepts every other model.
"""

from typing import Any

from engines.config.backends import ENGINES
from engines.config.base import local_path
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.training import TrainingConfig
from engines.data.read.tokenizer import text_config
from engines.training.vision_support import check_vision
from infra.errors import ConfigError
from infra.plugins import Row, load_row


def look_at_training(
    path: str | None, training: TrainingConfig | None, *, values: bool = False
) -> None:
    """Raise a ConfigError if the training backend does not support a local model.

    `training=None` and hub ids are not checked. `values` is True for a model with a value head.
    """
    directory = local_path(path)
    if directory is None or training is None:
        return
    check_vision(directory, training, values=values)
    row = ENGINES.place(training.backend)
    if row.check_model is not None:
        _load(row, row.check_model, ENGINES.setting)(directory, text_config(directory))


def look_at_rollout(path: str | None, rollout_engine: str | None) -> None:
    """Raise a ConfigError if the rollout engine does not serve a local model."""
    directory = local_path(path)
    if directory is None or rollout_engine is None:
        return
    row = ROLLOUT_ENGINES.place(rollout_engine)
    if row.refuses_model is None:
        return
    config = text_config(directory)
    lacking = _load(row, row.refuses_model, ROLLOUT_ENGINES.setting)(config)
    if lacking:
        raise ConfigError(
            ROLLOUT_ENGINES.setting,
            f"got {row.name}; {directory} is a {config.get('model_type')} model with {lacking}, "
            "which this engine does not compute; choose another engine or model",
        )


def _load(row: Row, target: str, setting: str) -> Any:
    """Load a function that a plugin row names beside its engine."""
    return load_row(Row(name=f"{row.name} (models)", target=target, owner=row.owner), setting)
