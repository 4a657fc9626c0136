"""Rules of sizes: what must fit into a context, and what must divide among ranks."""

from engines.config.training import TrainingConfig
from infra.errors import ConfigError


def check_answer_length(
    path: str, max_new_tokens: int, max_length: int, max_prompt_length: int | None = None
) -> None:
    """Refuse answers for which the context has no room behind a prompt.

    Args:
        path: the setting that limits the answer.
        max_length: of the context, `model.max_length`.
        max_prompt_length: of a prompt, `data.max_prompt_length`; None: it is not known, and a
            prompt has a token at least.

    Raises:
        ConfigError: names `path`.
    """
    if max_prompt_length is None:
        if max_new_tokens >= max_length:
            raise ConfigError(
                path,
                f"got {max_new_tokens}; need less than model.max_length {max_length}, which an "
                "answer shares with its prompt; lower it",
            )
        return
    total, room = max_prompt_length + max_new_tokens, max_length - max_prompt_length
    if total <= max_length:
        return
    remedy = f"lower it to {room}"
    if room <= 0:
        rest = max_length - max_new_tokens
        remedy = f"lower data.max_prompt_length to {rest}" if rest > 0 else "lower both"
    raise ConfigError(
        path,
        f"{max_prompt_length} (data.max_prompt_length) + {max_new_tokens} = {total} tokens "
        f"exceeds model.max_length {max_length}; {remedy}",
    )


def check_divides(path: str, size: int, training: TrainingConfig) -> None:
    """Refuse a batch that the data-parallel ranks cannot share equally.

    Args:
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
