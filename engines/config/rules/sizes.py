"""Rules of sizes: what must fit into a context, and what must divide among ranks."""

from engines.config.training import TrainingConfig
from infra.errors import ConfigError


def check_answer_length(
    path: str, max_new_tokens: int, max_length: int, max_prompt_length: int = 1
) -> None:
    """Refuse answers for which the context has no room behind a prompt.

    Args:
        path: the setting that limits the answer.
        max_new_tokens: of an answer.
        max_length: of the context, `model.max_length`.
        max_prompt_length: of a prompt, `data.max_prompt_length`, where it is known.

    Raises:
        ConfigError: names `path`.
    """
    total, room = max_prompt_length + max_new_tokens, max_length - max_prompt_length
    if total <= max_length:
        return
    remedy = f"lower it to {room}" if room > 0 else f"lower data.max_prompt_length to {max_length}"
    raise ConfigError(
        path,
        f"{max_prompt_length} (data.max_prompt_length) + {max_new_tokens} = {total} tokens "
        f"exceeds model.max_length {max_length}; {remedy}",
    )


def check_divides(path: str, size: int, training: TrainingConfig) -> None:
    """Refuse a batch that the data-parallel ranks cannot share equally.

    Args:
        path: the setting of the size.
        size: of a batch.
        training: says how many ranks hold different data.

    Raises:
        ConfigError: names `path`.
    """
    ranks = training.data_parallel_size
    if size % ranks == 0:
        return
    below, above = size // ranks * ranks, -(-size // ranks) * ranks
    use = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        path, f"{size} is not a multiple of the {ranks} data-parallel ranks; use {use}"
    )
