"""Decides if a sync sends only the LoRA adapter; imports neither torch nor an engine."""

from engines.config.backends import BACKENDS
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from infra.errors import ConfigError

SETTING = "rollout.lora_sync"
STREAMS_ADAPTER = "adapter stream"
ADAPTERS = "adapters"


def adapter_travels(training: TrainingConfig, rollout: RolloutConfig) -> bool:
    """Return True if a sync sends only the adapter, False if it sends merged weights.

    Raises:
        ConfigError: `rollout.lora_sync` is `adapter`, which backend or engine does not support.
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
