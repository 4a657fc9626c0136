"""The first rows of the local sources that a recipe names, and the template that writes them."""

from engines.config.base import local_path
from engines.config.data import DataConfig
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.sources import first_preference_row, first_rl_row, first_sft_row
from engines.data.read.chat import render_prompts
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError


def first_row(data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None) -> RLRow | None:
    """A row with a prompt, read or generated, which the template can write.

    Args:
        data: of a recipe or a suite.
        section: of it, for errors.
        tokenizer: of the model; None looks at no template.

    Returns:
        The row; None if all of the data is on the hub.

    Raises:
        ConfigError: of `look_at_data` or `look_at_prompt`.
    """
    row = look_at_data(data, section)
    if row is not None and tokenizer is not None:
        look_at_prompt(row, tokenizer)
    return row or generated_row(data)


def look_at_data(data: DataConfig, section: str = "data") -> RLRow | None:
    """Read the first usable row of every local source.

    Args:
        data: of the recipe, or of a suite.
        section: of it, for errors.

    Returns:
        The first RL row, else evaluation row; None if no local source has one.

    Raises:
        ConfigError: a column is absent, or no row is usable.
    """
    for place, source in enumerate(data.sft):
        if local_path(source.path):
            first_sft_row(source, f"{section}.sft.{place}")
    for split in ("preference", "preference_evaluation"):
        for place, source in enumerate(getattr(data, split)):
            if local_path(source.path):
                first_preference_row(source, f"{section}.{split}.{place}")
    rows = [
        first_rl_row(source, f"{section}.{split}.{place}")
        for split in ("rl", "evaluation")
        for place, source in enumerate(getattr(data, split))
        if local_path(source.path)
    ]
    return rows[0] if rows else None


def look_at_prompt(row: RLRow, tokenizer: DirectoryTokenizer) -> None:
    """Refuse a chat template that renders a prompt to nothing.

    Args:
        row: with a prompt.
        tokenizer: with the template that will be used.

    Raises:
        ConfigError: the rendered prompt has no token.
    """
    if not render_prompts(tokenizer, [row.prompt])[0]:
        raise ConfigError(
            "model.chat_template",
            "renders the first prompt to 0 tokens; need a template that writes the messages; set "
            "model.chat_template",
        )


def generated_row(data: DataConfig) -> RLRow | None:
    """One row of generated data; None where the rows are the hub's."""
    if data.arithmetic is None:
        return None
    few = data.arithmetic.model_copy(update={"num_sft": 1, "num_rl": 1, "num_eval": 1})
    return generate(few, seed=0).rl[0]
