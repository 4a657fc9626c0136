"""The model that a recipe starts from: its files, its adapter, its vocabulary, its context.

Promises: headers and JSON are read, no weight.
"""

from engines.checkpoint.model_directory import (
    check_model_directory,
    num_parameters,
    stated_context,
    stored_tensor_names,
)
from engines.config.base import local_path
from engines.config.look import Look
from engines.config.model import ModelConfig
from engines.config.training import LoraConfig
from engines.data.read.tokenizer import DirectoryTokenizer, check_vocabulary, text_config
from engines.jobs.preflight.engine_support import look_at_rollout, look_at_training
from infra.errors import ConfigError

_LINEAR_SUFFIX = ".weight"
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and two moments of the optimizer, each in float32."""
BYTES_OF_AVERAGE = 4
"""What a moving average of the weights adds to each of them."""


def look_at_policy(at: Look) -> DirectoryTokenizer | None:
    """Check the model, and that the engines compute it.

    Args:
        at: what the recipe names.

    Returns:
        Its tokenizer, as of `look_at_model`.

    Raises:
        ConfigError: names the setting.
    """
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
    """Check a local model directory by its headers.

    Args:
        model: of the recipe.
        lora: adapter that is to be trained, if any.
        trains: whether the model has to have room for `model.max_length`.

    Returns:
        Its tokenizer; None for a hub id, a model made from scratch, or a slow tokenizer.

    Raises:
        ConfigError: a file is missing or damaged, or the adapter's targets match nothing.
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


def look_at_stop_tokens(at: Look) -> None:
    """Refuse stop tokens that the vocabulary of a local model does not have.

    Args:
        at: what the recipe names.

    Raises:
        ConfigError: names the setting, the token and the vocabulary.
    """
    directory = local_path(at.model.path)
    size = text_config(directory).get("vocab_size") if directory else None
    for setting, ids in at.stop_token_ids.items():
        if size is not None and max(ids, default=0) >= size:
            raise ConfigError(
                setting,
                f"got {max(ids)}; need ids below {size}, the vocabulary of {directory}; take ids "
                "of its tokenizer",
            )


def look_at_answers(at: Look) -> None:
    """Refuse answers to a suite for which a model that is only measured has no room.

    Args:
        at: what the recipe names.

    Raises:
        ConfigError: names the setting.
    """
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


def checkpoint_bytes(at: Look) -> int | None:
    """How large a checkpoint of a local model is.

    Args:
        at: what the recipe names.

    Returns:
        Bytes; None for a model that is not here or is not trained, and for an adapter, whose
        checkpoints are small.
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
