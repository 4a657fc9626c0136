"""Rules of sizes: what must fit into a context, and what must divide among ranks."""

from engines.config.training import TrainingConfig
from infra.errors import ConfigError


def check_answer_length(
    path: str, max_new_tokens: int, max_length: int, max_prompt_length: int | None = None
) -> None:
    """Refuse answers that do not fit into the context behind a prompt.

    Raises `ConfigError` at `path`. `max_prompt_length` None means unknown: at least one token.
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
    """Refuse a batch not divisible by the data-parallel ranks; raises `ConfigError` at `path`."""
    ranks = training.data_parallel_size
    if size % ranks == 0:
        return
    below, above = size // ranks * ranks, -(-size // ranks) * ranks
    use = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        path, f"{size} is not a multiple of the {ranks} data-parallel ranks; use {use}"
    )
