"""The first lines of a stage that serves: the device, and which model of its inputs it is."""

from typing import TypeVar

from engines.config.model import ModelConfig
from engines.config.stages.serving import AnsweringStageConfig
from engines.jobs.policy.files import HF_DIR
from engines.jobs.process.runtime import JobContext
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.serving.model import (
    ServedModel,
    served_directory,
    served_foreign,
    served_policy,
)

Config = TypeVar("Config", bound=AnsweringStageConfig)


def load_served(context: JobContext[Config], foreign: ModelConfig | None = None) -> ServedModel:
    """Set torch up for a stage, and find what it serves.

    Args:
        context: of the job.
        foreign: of its configuration: a model that no stage made.

    Returns:
        The input `policy`; without one, the foreign model; without that, the input `model`.

    Raises:
        ConfigError: the planned platform is not here, or the model cannot be used.
    """
    config = context.config
    prepare_torch(
        config.hardware, config.num_threads, context.journal.log, computes=config.driver_computes
    )
    policy_dir = context.optional_input("policy")
    if policy_dir is not None:
        return served_policy(policy_dir)
    if foreign is not None:
        serving_dir = context.attempt_dir / HF_DIR
        return served_foreign(foreign, context.optional_input("model"), serving_dir)
    return served_directory(context.input("model"))
