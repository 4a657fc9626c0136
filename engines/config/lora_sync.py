"""Decides if a sync sends the LoRA adapter alone; imports neither torch nor an engine."""

from engines.config.backends import BACKENDS
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from infra.errors import ConfigError

SETTING = "rollout.lora_sync"
STREAMS_ADAPTER = "adapter stream"
"""Feature of a training backend."""
ADAPTERS = "adapters"
"""Capability of a rollout engine."""


def adapter_travels(training: TrainingConfig, rollout: RolloutConfig) -> bool:
    """True if a sync sends the adapter alone; else it merges the adapter into the weights.

    Returns:
        False where `rollout.lora_sync` says so, or where one of the two sides cannot.

    Raises:
        ConfigError: it says `adapter`, and one of the two sides cannot.
    """
    if rollout.lora_sync == "merged":
        return False
    hindrance = _hindrance(training, rollout)
    if hindrance is not None and rollout.lora_sync == "adapter":
        raise ConfigError(SETTING, f"got adapter, and {hindrance}; choose auto or merged")
    return hindrance is None


def _hindrance(training: TrainingConfig, rollout: RolloutConfig) -> str | None:
    lora, backend = training.lora, BACKENDS.get(training.backend)
    if lora is None:
        return "training.lora is null; need an adapter"
    if lora.use_dora:
        return "training.lora.use_dora is true; need an adapter without magnitudes"
    if backend is None or STREAMS_ADAPTER not in backend.features:
        able = sorted(name for name, each in BACKENDS.items() if STREAMS_ADAPTER in each.features)
        return f"training.backend is {training.backend}; need one of {', '.join(able)}"
    if ADAPTERS not in ROLLOUT_ENGINES.place(rollout.engine).capabilities:
        rows = (*ROLLOUT_ENGINES.rows, *ROLLOUT_ENGINES.outside())
        able = sorted(row.name for row in rows if ADAPTERS in row.capabilities)
        return f"rollout.engine is {rollout.engine}; need one of {', '.join(able)}"
    if rollout.placement == "colocated":
        return (
            "rollout.placement is colocated, where an engine forgets at every sleep what an "
            "adapter stands on; need disaggregated"
        )
    return None
