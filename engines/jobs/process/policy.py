"""Reads and writes the files of a `policy` artifact, and finds the weights a pipeline starts from.

    checkpoint/    sharded weights and optimizer; a critic's are below roles/
    hf/            config.json, generation_config.json, tokenizer; no weights
    trainer.json   the stage that made it, its steps, and how many it skipped at the end

Promises: `hf/` names every token that ends an answer, including the one with which the chat
template ends the assistant's turn, which the base model may not know as an end token.
"""

import json
import os
import shutil
from pathlib import Path

from engines.checkpoint.model_directory import (
    check_finite,
    check_model_directory,
    create_random_model,
    resolve_model,
)
from engines.config.model import ModelConfig
from engines.data.read.chat import end_of_turn_id
from engines.data.read.dataset import load_dataset
from engines.data.read.tokenizer import (
    TOOL_TEMPLATE,
    DirectoryTokenizer,
)
from engines.trainers.trained_steps import TrainedSteps
from engines.training.spec import ModelSource
from infra.errors import ConfigError
from infra.store.canonical import canonical_json

CHECKPOINT_DIR = "checkpoint"
HF_DIR = "hf"
TRAINER_NAME = "trainer.json"

_HF_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "preprocessor_config.json",
    "processor_config.json",
)


def policy_source(policy_dir: Path) -> ModelSource:
    """Return where the weights of a `policy` artifact are."""
    return ModelSource(policy_dir / HF_DIR, policy_dir / CHECKPOINT_DIR)


def initial_source(
    model: ModelConfig, external: Path | None, dataset_dir: Path, seed: int, work_dir: Path
) -> ModelSource:
    """Check and return the source of a pipeline's first weights: local, downloaded, or random.

    Args:
        external: the model as an input of the stage, if it is a local directory.
        dataset_dir: holds the tokenizer for a random model.
        work_dir: where a random model is written; every attempt writes the same bytes.
    """
    if model.init == "pretrained":
        if external is not None:
            check_model_directory(external, max_length=model.max_length)
        directory = external or resolve_model(model, model.max_length)
        check_finite(directory)
        return ModelSource(directory)
    tokenizer_dir = load_dataset(dataset_dir).tokenizer_dir
    if tokenizer_dir is None:
        raise ConfigError(
            "model.init", "got random; need a dataset that was made with model.init: random"
        )
    made = work_dir / "initial_model"
    shutil.rmtree(made, ignore_errors=True)
    create_random_model(model.architecture, tokenizer_dir, model.max_length, seed, made)
    return ModelSource(made)


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer unchanged; replaces `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _HF_FILES:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def write_hf_files(source: Path, target: Path, chat_template: str | None) -> None:
    """Copy configuration and tokenizer and add missing end tokens; replaces `target`.

    A `chat_template` replaces the tokenizer's own. Raise ConfigError if no token ends an answer.
    """
    copy_hf_files(source, target)
    if chat_template is not None:
        (target / TOOL_TEMPLATE).unlink(missing_ok=True)
        (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="")
    path = target / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    known = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = known if isinstance(known, list) else [] if known is None else [known]
    turn_end = end_of_turn_id(DirectoryTokenizer.load(target))
    if turn_end is not None and turn_end not in ends:
        ends = [*ends, turn_end]
    if not ends:
        raise ConfigError(
            "model.path",
            f"{source} names no token that ends an answer: every one would go on to its limit; "
            "need eos_token_id; set it in config.json or generation_config.json",
        )
    generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    path.write_text(
        json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline=""
    )


def write_policy(
    output_dir: Path,
    checkpoint: Path,
    hf_dir: Path,
    steps: TrainedSteps,
) -> None:
    """Lay out a `policy` artifact in an empty directory on the checkpoint's file system.

    The files of the checkpoint are hard-linked, since they never change.
    """
    shutil.copytree(checkpoint, output_dir / CHECKPOINT_DIR, copy_function=os.link)
    shutil.copytree(hf_dir, output_dir / HF_DIR, copy_function=shutil.copyfile)
    (output_dir / TRAINER_NAME).write_bytes(canonical_json(steps.model_dump()) + b"\n")


def trained_steps(policy_dir: Path) -> TrainedSteps:
    """Return the content of a `policy` artifact's `trainer.json`."""
    return TrainedSteps.model_validate_json((policy_dir / TRAINER_NAME).read_bytes())
