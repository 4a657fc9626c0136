"""Engines of a configured backend for the device of a platform.

The rows are those of `engines.config.backends`, and of other people: ``backend.<name>`` (a language
model) or ``backend.<name>.value_model``. A class is imported when it is asked for, so a backend
whose library is missing fails by name and with its reason, and only when it is wanted.
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
    """Make an engine of the configured backend for a platform; `initialize` builds it.

    Args:
        model_type: `language_model` or `value_model`.
        hf_dir: Hugging Face directory of the model.
        training: backend and numerics.
        optimizer: None makes an engine that only infers.
        total_steps: optimizer steps of the run, for the schedule.
        platform: the device; RLHF_ENGINE_DEVICE and RLHF_ENGINE_VENDOR override what is looked up.
        seed: of everything random in the engine.
        temperature: of the distribution that log-probabilities speak of.

    Returns:
        The engine of this rank.

    Raises:
        ConfigError: no such backend on this platform, or an option, layout or feature it has not.
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
