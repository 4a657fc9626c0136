"""Checks the other models of a recipe: compared, reward, judge and teacher.

Each local model is checked by its headers, and its chat template with one prompt.
"""

from collections.abc import Callable
from pathlib import Path

from engines.checkpoint.model_directory import check_model_directory, check_reward_model
from engines.checkpoint.models.teacher import TEACHER_SECTION, check_teacher
from engines.config.base import local_path
from engines.config.distillation import DistillationConfig
from engines.config.model import (
    JudgeConfig,
    ModelConfig,
    RewardModelConfig,
)
from engines.config.preflight_request import PreflightRequest
from engines.config.rules.distillation import num_spare_tokens
from engines.config.training import TrainingConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer, check_vocabulary
from engines.jobs.preflight.engine_support import look_at_rollout, look_at_training
from engines.jobs.preflight.models import look_at_model
from engines.jobs.preflight.reward import perfect_answer
from engines.jobs.preflight.rows import look_at_prompt
from engines.rewards.judges.question import question
from infra.section_names import renamed_sections

REWARD_MODEL_SECTION, JUDGE_SECTION = "rl.reward.model", "rl.reward.judge"


def look_at_against(at: PreflightRequest) -> DirectoryTokenizer | None:
    """Check the model to compare with and return its tokenizer; None if there is no such model."""
    if at.against is None:
        return None
    with renamed_sections({"model": "against"}):
        tokenizer = look_at_model(at.against, None, trains=False)
    look_at_rollout(at.against.path, at.rollout_engine)
    return tokenizer


def look_at_reward_model(
    model: RewardModelConfig, training: TrainingConfig | None, row: RLRow | None
) -> None:
    """Check a reward model and that the ranks support it; its template only if a row is given."""
    _look_at_judging(REWARD_MODEL_SECTION, check_reward_model, model, row)
    with renamed_sections({"model": REWARD_MODEL_SECTION}):
        look_at_training(model.path, training, values=True)


def look_at_judge(judge: JudgeConfig, rollout_engine: str | None, row: RLRow | None) -> None:
    """Check a judge, its question about `row`, and that the engine serves it."""
    if row is not None:
        question(judge.prompt, row.prompt, perfect_answer(row))
    _look_at_judging(JUDGE_SECTION, check_model_directory, judge, row)
    look_at_rollout(judge.path, rollout_engine)


def look_at_teacher(
    teacher: DistillationConfig,
    training: TrainingConfig | None,
    model: ModelConfig,
    rollout_engine: str | None,
) -> None:
    """Check a teacher, its tokens against a local policy's, and the engine or backend that runs it.

    Args:
        training: configuration of the ranks, which hold a teacher that no engine serves.
        model: policy to teach; the job compares the tokens of a random one.
    """
    directory = local_path(teacher.path)
    if directory is not None:
        num_spare = num_spare_tokens(teacher, rollout_engine)
        check_teacher(teacher, directory, local_path(model.path), model.max_length, num_spare)
    if teacher.served is not None:
        look_at_rollout(teacher.path, rollout_engine)
        return
    with renamed_sections({"model": TEACHER_SECTION}):
        look_at_training(teacher.path, training)


def _look_at_judging(
    section: str,
    check: Callable[..., None],
    model: RewardModelConfig | JudgeConfig,
    row: RLRow | None,
) -> None:
    """Check headers, tokenizer and template of a model that scores answers."""
    directory = local_path(model.path)
    if directory is None:
        return
    with renamed_sections({"model": section}):
        check(directory, max_length=model.max_length)
        _look_at_template(directory, model.chat_template, row)


def _look_at_template(directory: Path, chat_template: str | None, row: RLRow | None) -> None:
    if not (directory / "tokenizer.json").exists():
        return
    tokenizer = DirectoryTokenizer.load(directory, chat_template)
    check_vocabulary(directory, tokenizer.max_token_id + 1)
    if row is not None:
        look_at_prompt(row, tokenizer)
