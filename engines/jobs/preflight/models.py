"""Checks the local models of a recipe by their headers and JSON; reads no weights.

Policies and models to compare with: files, adapter, vocabulary, context. Reward models, judges and
teachers: also their chat template, with one prompt. All: whether the engines support them.
Promises: what is refused here the engine itself would refuse, by the same function, or compute
wrongly. Does not promise that an engine accepts every other model.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.checkpoint.model_directory import (
    check_model_directory,
    num_parameters,
    stated_context,
    stored_tensor_names,
)
from engines.checkpoint.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import DistillationConfig
from engines.config.backends import ENGINES
from engines.config.base import local_path
from engines.config.model import (
    JudgeConfig,
    ModelConfig,
    RewardModelConfig,
)
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.preflight_request import PreflightRequest
from engines.config.rules.algorithm import num_spare_tokens
from engines.config.training import LoraConfig, TrainingConfig
from engines.data.read.chat import render_prompts
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer, check_vocabulary, text_config
from engines.rewards.base import SampledTokens, ScoreRequest
from engines.training.supported_models import check_vision
from infra.errors import ConfigError
from infra.names import renamed_sections
from infra.plugins import Row, load_row


def look_at_training(
    path: str | None, training: TrainingConfig | None, *, values: bool = False
) -> None:
    """Raise a ConfigError if the training backend does not support a local model.

    `training=None` and hub ids are not checked. `values` is True for a model with a value head.
    """
    directory = local_path(path)
    if directory is None or training is None:
        return
    check_vision(directory, training, values=values)
    row = ENGINES.place(training.backend)
    if row.check_model is not None:
        _load(row, row.check_model, ENGINES.setting)(directory, text_config(directory))


def look_at_rollout(path: str | None, rollout_engine: str | None) -> None:
    """Raise a ConfigError if the rollout engine does not serve a local model."""
    directory = local_path(path)
    if directory is None or rollout_engine is None:
        return
    row = ROLLOUT_ENGINES.place(rollout_engine)
    if row.refuses_model is None:
        return
    config = text_config(directory)
    lacking = _load(row, row.refuses_model, ROLLOUT_ENGINES.setting)(config)
    if lacking:
        raise ConfigError(
            ROLLOUT_ENGINES.setting,
            f"got {row.name}; {directory} is a {config.get('model_type')} model with {lacking}, "
            "which this engine does not compute; choose another engine or model",
        )


def _load(row: Row, target: str, setting: str) -> Any:
    """Load a function that a plugin row names beside its engine."""
    return load_row(Row(name=f"{row.name} (models)", target=target, owner=row.owner), setting)


BYTES_PER_PARAMETER = 12
"""Checkpoint bytes per parameter: weight and two optimizer moments in float32."""
BYTES_OF_AVERAGE = 4
"""Additional bytes per parameter for a moving average of the weights."""


def look_at_model(
    model: ModelConfig, lora: LoraConfig | None, *, trains: bool = True
) -> DirectoryTokenizer | None:
    """Check a local model directory by its headers and return its tokenizer.

    Args:
        lora: adapter to train, if any; its targets must exist.
        trains: True if the model needs a context of `model.max_length`.

    Returns:
        None for a hub id, a random model or a tokenizer without `tokenizer.json`.
    """
    directory = local_path(model.path)
    if directory is None:
        return None
    check_model_directory(directory, max_length=model.max_length if trains else None)
    names = stored_tensor_names(directory)
    if lora is not None and lora.target_modules != "all-linear":
        linear = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
        modules = sorted({name.rpartition(".")[2] for name in linear})
        for target in lora.target_modules:
            if target not in modules:
                raise ConfigError(
                    "training.lora.target_modules",
                    f"got {target!r}; the model has no such module; need some of: "
                    f"{', '.join(modules)}",
                )
    return _checked_tokenizer(directory, model.chat_template)


def _checked_tokenizer(directory: Path, chat_template: str | None) -> DirectoryTokenizer | None:
    if not (directory / "tokenizer.json").exists():
        return None
    tokenizer = DirectoryTokenizer.load(directory, chat_template)
    check_vocabulary(directory, max(tokenizer.tokens, default=-1) + 1)
    return tokenizer


def look_at_stop_tokens(at: PreflightRequest) -> None:
    """Raise a ConfigError if a stop token is outside the vocabulary of a local model."""
    directory = local_path(at.model.path)
    size = text_config(directory).get("vocab_size") if directory else None
    for setting, ids in at.stop_token_ids.items():
        if size is not None and max(ids, default=0) >= size:
            raise ConfigError(
                setting,
                f"got {max(ids)}; need ids below {size}, the vocabulary of {directory}; take ids "
                "of its tokenizer",
            )


def look_at_answers(at: PreflightRequest) -> None:
    """Raise a ConfigError if a model that is only evaluated has no room for a suite's answers."""
    for model in [at.against] if at.trains else [at.model, at.against]:
        directory = local_path(model.path) if model else None
        context = stated_context(directory) if directory else None
        for setting, max_new_tokens in at.answer_lengths.items():
            if context is not None and max_new_tokens >= context:
                raise ConfigError(
                    setting,
                    f"got {max_new_tokens}; {directory} was built for {context} tokens, prompt and "
                    "answer together; need less; lower it",
                )


def checkpoint_bytes(at: PreflightRequest) -> int | None:
    """Return the checkpoint size of a local model in bytes.

    None for a hub id, for a model that is not trained, and for an adapter (small checkpoints).
    """
    directory = local_path(at.model.path)
    if directory is None or (at.training and at.training.lora) or not at.trains:
        return None
    return num_parameters(directory) * (
        BYTES_PER_PARAMETER + (BYTES_OF_AVERAGE if at.averages else 0)
    )


def look_at_teacher(
    teacher: DistillationConfig,
    training: TrainingConfig | None,
    model: ModelConfig,
    rollout_engine: str | None,
) -> None:
    """Check a teacher, its tokens against a local policy's, and the engine or backend that runs it.

    Args:
        training: configuration of the ranks, which hold a teacher that no engine serves.
        model: policy to teach; if it starts at random, only the job compares its tokens.
    """
    directory = local_path(teacher.path)
    if directory is not None:
        check_teacher(
            teacher,
            directory,
            local_path(model.path),
            model.max_length,
            num_spare_tokens(teacher, rollout_engine),
        )
    if teacher.served is not None:
        look_at_rollout(teacher.path, rollout_engine)
        return
    with renamed_sections({"model": TEACHER_SECTION}):
        look_at_training(teacher.path, training)


def look_at_judging(
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
        tokenizer = _checked_tokenizer(directory, model.chat_template)
        if tokenizer is not None and row is not None:
            look_at_prompt(row, tokenizer)


def look_at_prompt(row: RLRow, tokenizer: DirectoryTokenizer) -> None:
    """Raise a ConfigError if the chat template renders a prompt to no tokens."""
    if not render_prompts(tokenizer, [row.prompt])[0]:
        raise ConfigError(
            "model.chat_template",
            "renders the first prompt to 0 tokens; need a template that writes the messages; set "
            "model.chat_template",
        )


def perfect_answer(row: RLRow | None) -> ScoreRequest:
    """Return a request whose answer is the ground truth, with made-up scores of the models."""
    truth = row.reward_model.ground_truth if row else ""
    return ScoreRequest(
        data_source=row.data_source if row else "preflight",
        solution_str=truth if isinstance(truth, str) else json.dumps(truth),
        ground_truth=truth,
        extra_info=row.extra_info if row else {},
        # The text was not sampled: a reward that reads tokens gets one dummy token.
        tokens=SampledTokens((0,), (0,), (0.0,), "stop"),
        model_score=0.0,
        judgement="0",
    )
