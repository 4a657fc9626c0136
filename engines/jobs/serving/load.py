"""Start of a stage that serves a model: sets up torch and finds the model."""

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
    """Return the input `policy`, else the `foreign` model, else the input `model`.

    A foreign model is one that no stage made.
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
