"""The rule for a moving average of weights."""

from engines.config.backends import BACKENDS
from engines.config.training import OptimizerConfig, TrainingConfig
from infra.errors import ConfigError

FEATURE = "ema"
"""Feature of a training backend that keeps a moving average of weights."""


def check_average(path: str, optimizer: OptimizerConfig, training: TrainingConfig) -> None:
    """Refuse an average that a built-in backend cannot keep; raises `ConfigError`."""
    backend = BACKENDS.get(training.backend)
    if optimizer.ema is None or backend is None or FEATURE in backend.features:
        return
    able = [name for name, other in BACKENDS.items() if FEATURE in other.features]
    raise ConfigError(
        f"{path}.ema",
        f"got one; {training.backend} keeps no average of its weights; need null; remove it, or "
        f"set training.backend to {' or '.join(able)}",
    )
