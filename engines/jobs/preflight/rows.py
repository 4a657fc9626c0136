"""The first rows of what a recipe reads: whether there are some, and what they ask of a model.

Promises: no file is read beyond its first hundred rows; of a source on the hub nothing is read.
"""

from collections.abc import Mapping, Sequence

from engines.config.base import local_path
from engines.config.data import DataConfig
from engines.config.plugins import layouts_with_images, layouts_without_truth
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.sources import first_preference_row, first_rl_row, first_sft_row
from engines.data.read.chat import render_conversations, render_prompts
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from infra.errors import ConfigError

_PROMPTS = ("rl", "evaluation")


def first_rows(
    data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None
) -> dict[str, RLRow]:
    """Read the first usable row of every local source, and have the template write it.

    Args:
        data: of the recipe, or of a suite.
        section: of it, for errors.
        tokenizer: of the model; None looks at no template.

    Returns:
        Those of the RL split, then of the evaluation split, by the source's place.

    Raises:
        ConfigError: a column is absent, no row is usable, or the template cannot write one.
    """
    for path, place in _local(data, section, ("sft",)):
        row = first_sft_row(data.sft[place], path)
        if tokenizer is not None:
            render_conversations(tokenizer, [row.messages])
    for split in ("preference", "preference_evaluation"):
        for path, place in _local(data, section, (split,)):
            pair = first_preference_row(getattr(data, split)[place], path)
            if tokenizer is not None:
                render_conversations(tokenizer, pair.conversations)
    rows: dict[str, RLRow] = {}
    for split in _PROMPTS:
        for path, place in _local(data, section, (split,)):
            rows[path] = first_rl_row(getattr(data, split)[place], path)
            if tokenizer is not None:
                look_at_prompt(rows[path], tokenizer)
    return rows


def first_row(data: DataConfig, rows: Mapping[str, RLRow]) -> RLRow | None:
    """A row with a prompt, read or generated.

    Args:
        data: of a recipe or a suite.
        rows: of `first_rows`.

    Returns:
        The row; None if all of the data is on the hub.
    """
    return next(iter(rows.values()), None) or generated_row(data)


def show_images(data: DataConfig, rows: Mapping[str, RLRow], section: str) -> list[str]:
    """Which sources show images.

    Args:
        data: of a recipe or a suite.
        rows: of `first_rows`.
        section: of the data, for errors.

    Returns:
        The place of each whose first row or layout says so.
    """
    shown = [path for path, row in rows.items() if row.images]
    known = layouts_with_images()
    for split in _PROMPTS:
        for place, source in enumerate(getattr(data, split)):
            if source.format in known:
                shown.append(f"{section}.{split}.{place}")
    return list(dict.fromkeys(shown))


def without_truth(
    data: DataConfig, rows: Mapping[str, RLRow], section: str, splits: Sequence[str]
) -> dict[str, RLRow | None]:
    """Which sources have no ground truth.

    Args:
        data: of a recipe or a suite.
        rows: of `first_rows`.
        section: of the data, for errors.
        splits: those that are looked at.

    Returns:
        By the place of each whose first row or layout says so, that row; None where the hub has it.
    """
    known = layouts_without_truth()
    found: dict[str, RLRow | None] = {}
    for split in splits:
        for place, source in enumerate(getattr(data, split)):
            row = rows.get(path := f"{section}.{split}.{place}")
            if row.reward_model.ground_truth is None if row else source.format in known:
                found[path] = row
    return found


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


def _local(data: DataConfig, section: str, splits: tuple[str, ...]) -> list[tuple[str, int]]:
    """Place in the configuration, and in its split, of the sources that are here."""
    return [
        (f"{section}.{split}.{place}", place)
        for split in splits
        for place, source in enumerate(getattr(data, split))
        if local_path(source.path)
    ]
