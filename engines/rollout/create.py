"""The rollout engine that a configuration names."""

from pathlib import Path

from engines.config.options import check_options
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig
from engines.rollout.base import RolloutEngine
from hardware.base import PlatformBase
from infra.plugins import load_row

BEHIND_SERVICE_S = 60.0


def behind_service(rollout: RolloutConfig) -> RolloutConfig:
    """For an engine of a service, which aborts at the deadline and so saves what was sampled.

    Args:
        rollout: with the deadline of the service.

    Returns:
        The same, with that of the engine: behind it.
    """
    return rollout.model_copy(update={"timeout_s": rollout.timeout_s + BEHIND_SERVICE_S})


def create_rollout_engine(
    name: str,
    hf_dir: Path,
    rollout: RolloutConfig,
    dtype: str,
    platform: PlatformBase,
    adapter: LoraConfig | None = None,
) -> RolloutEngine:
    """Build a rollout engine. It serves nothing before its first weight update.

    Args:
        name: of the engine.
        hf_dir: model directory.
        rollout: capacity, deadline and options.
        dtype: `float32` or `bfloat16`.
        platform: where it runs.
        adapter: shape of one that comes beside the weights, for an engine that has the capability;
            None: none does.

    Returns:
        The engine, without weights.

    Raises:
        ConfigError: nobody has that engine, or two have, or it does not load, or it cannot serve
            that model or those options.
    """
    row = ROLLOUT_ENGINES.find(name)
    check_options(rollout.options, [row], "rollout.options")
    make = load_row(row, ROLLOUT_ENGINES.setting)
    beside = {} if adapter is None else {"adapter": adapter}
    return make(hf_dir, rollout, dtype, platform, **beside)
