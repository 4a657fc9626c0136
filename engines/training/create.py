"""Creates the engine of the configured backend for a platform.

A class is imported only when it is requested, so a missing library is reported only when its
backend is used.
"""

from pathlib import Path

from engines.config.backends import ENGINES, check_layout, engine_name, job_interpreter
from engines.config.options import check_options
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.training.base import BaseEngine
from engines.training.spec import EngineSpec, ModelType
from hardware.base import PlatformBase
from infra import env
from infra.errors import ConfigError
from infra.plugins import load_row

_SETTING = ENGINES.setting


def create_engine(
    model_type: ModelType,
    hf_dir: Path,
    training: TrainingConfig,
    optimizer: OptimizerConfig | None,
    total_steps: int,
    platform: PlatformBase,
    seed: int,
    *,
    temperature: float = 1.0,
) -> BaseEngine:
    """Create an engine of the configured backend; call `initialize` to build the model.

    Args:
        optimizer: None creates an engine that only infers.
        total_steps: optimizer steps of the run, for the schedule.
        platform: RLHF_ENGINE_DEVICE and RLHF_ENGINE_VENDOR override its names in the look-up.

    Raises:
        ConfigError: the platform has no such backend, or the backend lacks an option or layout.
    """
    check_layout(training)
    row = ENGINES.find(
        engine_name(training.backend, model_type),
        device=env.RLHF_ENGINE_DEVICE.get() or platform.device_name,
        vendor=env.RLHF_ENGINE_VENDOR.get() or platform.vendor_name,
    )
    if job_interpreter(training.backend, _SETTING) is not None:
        raise ConfigError(
            _SETTING, f"{training.backend} runs in a job environment of its own, not in this one"
        )
    check_options(training.options, [row], "training.options")
    engine_class = load_row(row, _SETTING)
    spec = EngineSpec(
        hf_dir, training, optimizer, total_steps, platform, seed, temperature, model_type
    )
    return engine_class(spec)
