"""Creates the rollout engine that a configuration names."""

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
    """Return the configuration with a later deadline, for an engine behind a service.

    The service must reach its deadline first: it aborts and so keeps what was sampled.
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
    """Build the named rollout engine. It serves nothing before its first weight update.

    An adapter shape is only for engines with `ADAPTERS`; None: there is no adapter.

    Raises:
        ConfigError: unknown or ambiguous name, or the engine refuses the model or the options.
    """
    row = ROLLOUT_ENGINES.find(name)
    check_options(rollout.options, [row], "rollout.options")
    make = load_row(row, ROLLOUT_ENGINES.setting)
    beside = {} if adapter is None else {"adapter": adapter}
    return make(hf_dir, rollout, dtype, platform, **beside)
