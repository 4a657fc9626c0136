"""The rule of a moving average of weights."""

from engines.config.backends import BACKENDS
from engines.config.training import OptimizerConfig, TrainingConfig
from infra.errors import ConfigError

FEATURE = "ema"
"""Capability of a training backend that keeps a moving average of weights."""


def check_average(path: str, optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    """Refuse an average that the built-in backend does not keep.

    Args:
        optimizer: of a role that is trained.
        training: names the backend; one of another distribution is asked when it is made.

    Raises:
        ConfigError: names the setting and the backends that have it.
    """
    backend = BACKENDS.get(training.backend)
    if optimizer.ema is None or backend is None or FEATURE in backend.features:
        return
    able = [name for name, other in BACKENDS.items() if FEATURE in other.features]
    raise ConfigError(
        f"{path}.ema",
        f"got one; {training.backend} keeps no average of its weights; need null; remove it, or "
        f"set training.backend to {' or '.join(able)}",
    )
