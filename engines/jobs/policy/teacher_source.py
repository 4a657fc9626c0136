"""The teacher of a round: a frozen model, checked against the policy."""

from pathlib import Path

from engines.checkpoint.model_directory import resolve_model
from engines.checkpoint.models.teacher import TEACHER_SECTION, check_teacher
from engines.config.distillation import DistillationConfig
from engines.config.rules.distillation import num_spare_tokens
from engines.training.roles import ModelSource
from infra.section_names import renamed_sections


def teacher_source(
    config: DistillationConfig,
    given: Path | None,
    policy: ModelSource,
    max_length: int,
    rollout_engine: str,
) -> ModelSource:
    """Return the directory of the teacher's weights; a ConfigError names the bad field.

    `given` is a local directory, None for the hub. `max_length` is the policy's context.
    """
    with renamed_sections({"model": TEACHER_SECTION}):
        directory = given or resolve_model(config, max_length)
    num_spare = num_spare_tokens(config, rollout_engine)
    check_teacher(config, directory, policy.hf_dir, max_length, num_spare)
    return ModelSource(directory)
