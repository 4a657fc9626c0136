"""Check that a model can be a policy's teacher; reads headers and tokenizers, imports no torch."""

from pathlib import Path

from engines.checkpoint.model_directory import check_model_directory, stated_context
from engines.config.algorithm import TOPK, DistillationConfig
from engines.data.read.tokenizer import check_same_tokens, text_config
from infra.errors import ConfigError
from infra.names import renamed_sections

TEACHER_SECTION = "rl.distillation"


def check_teacher(
    config: DistillationConfig,
    teacher_dir: Path,
    policy_dir: Path | None,
    max_length: int,
    num_spare_tokens: int = 0,
) -> None:
    """Raise `ConfigError` if tokenizers differ, or a context or vocabulary is too small.

    Context needed: `max_length` + `num_spare_tokens`. Without `policy_dir`, skips the tokenizers.
    """
    with renamed_sections({"model": TEACHER_SECTION}):
        check_model_directory(teacher_dir, max_length=max_length)
        context = stated_context(teacher_dir)
    needed = max_length + num_spare_tokens
    if context is not None and needed > context:
        raise ConfigError(
            f"{TEACHER_SECTION}.served",
            f"got a teacher of {context} tokens, {teacher_dir}; need {needed}, for answers that "
            f"fill model.max_length {max_length}; lower that, or set this to null",
        )
    configs = [text_config(each) for each in (teacher_dir, policy_dir) if each is not None]
    size = min((each["vocab_size"] for each in configs if "vocab_size" in each), default=None)
    if config.loss == TOPK and size is not None and config.num_top > size:
        raise ConfigError(
            f"{TEACHER_SECTION}.num_top",
            f"got {config.num_top}; need at most the vocabulary of {size} tokens; lower it",
        )
    if policy_dir is not None:
        check_same_tokens(policy_dir, teacher_dir, f"{TEACHER_SECTION}.path", "a teacher")
