"""Which backends can train a vision-language model, from its `config.json` alone."""

from pathlib import Path

from engines.checkpoint.model_directory import VISION_MODEL_TYPES, vision_model_type
from engines.config.backends import BACKENDS
from engines.config.training import TrainingConfig
from infra.errors import ConfigError


def check_vision(hf_dir: Path, training: TrainingConfig, *, values: bool = False) -> None:
    """Refuse a vision-language model where it cannot be trained; imports no torch.

    Backends of plugins are not checked. `values` is True for a value model.

    Raises:
        ConfigError: the architecture, backend, model type or layout does not support it.
    """
    architecture, backend = vision_model_type(hf_dir), training.backend
    if architecture is None or backend not in BACKENDS:
        return
    able = [name for name, other in BACKENDS.items() if "vlm" in other.features]
    what = f"{hf_dir} is a {architecture}, which sees images"
    if backend not in able:
        problem = f"{what}; {backend} trains text models; use {' or '.join(able)}"
    elif architecture not in VISION_MODEL_TYPES:
        problem = f"{what}; of those only {', '.join(VISION_MODEL_TYPES)} can be trained"
    elif values:
        problem = f"{what}; a value model cannot; choose a text model"
    elif training.ulysses_size > 1:
        problem = f"{what}; Ulysses cannot cut them; set training.ulysses_size to 1"
    else:
        return
    raise ConfigError("model.path", problem)
