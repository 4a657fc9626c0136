"""Checks the model that a recipe starts from: files, adapter, vocabulary, context.

Promises: only headers and JSON are read, no weights.
"""

from engines.checkpoint.model_directory import (
    check_model_directory,
    num_parameters,
    stated_context,
    stored_tensor_names,
)
from engines.config.base import local_path
from engines.config.model import ModelConfig
from engines.config.preflight_request import PreflightRequest
from engines.config.training import LoraConfig
from engines.data.read.tokenizer import DirectoryTokenizer, check_vocabulary, text_config
from engines.jobs.preflight.engine_support import look_at_rollout, look_at_training
from infra.errors import ConfigError

_LINEAR_SUFFIX = ".weight"
BYTES_PER_PARAMETER = 12
"""Checkpoint bytes per parameter: weight and two optimizer moments in float32."""
BYTES_OF_AVERAGE = 4
"""Additional bytes per parameter for a moving average of the weights."""


def look_at_policy(at: PreflightRequest) -> DirectoryTokenizer | None:
    """Check that the engines support the model, and return its tokenizer as `look_at_model`."""
    training = at.training if at.trains else None
    lora = at.training.lora if at.training else None
    tokenizer = look_at_model(at.model, lora, trains=at.trains)
    look_at_training(at.model.path, training)
    look_at_stop_tokens(at)
    look_at_rollout(at.model.path, at.rollout_engine)
    return tokenizer


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
        _check_targets(names, lora.target_modules)
    if not (directory / "tokenizer.json").exists():
        return None
    tokenizer = DirectoryTokenizer.load(directory, model.chat_template)
    check_vocabulary(directory, tokenizer.max_token_id + 1)
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
    measured = [at.against] if at.trains else [at.model, at.against]
    for model in measured:
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

    None for a hub id, an untrained model, and an adapter, whose checkpoints are small.
    """
    directory = local_path(at.model.path)
    has_adapter = at.training is not None and at.training.lora is not None
    if directory is None or has_adapter or not at.trains:
        return None
    bytes_each = BYTES_PER_PARAMETER + (BYTES_OF_AVERAGE if at.averages else 0)
    return num_parameters(directory) * bytes_each


def _check_targets(names: list[str], targets: tuple[str, ...]) -> None:
    modules = {
        name.removesuffix(_LINEAR_SUFFIX).rpartition(".")[2]
        for name in names
        if name.endswith(_LINEAR_SUFFIX)
    }
    missing = [target for target in targets if target not in modules]
    if missing:
        raise ConfigError(
            "training.lora.target_modules",
            f"got {missing[0]!r}; the model has no such module; need some of: "
            f"{', '.join(sorted(modules))}",
        )
