"""Checks the first rows of the local sources of a recipe.

Promises: at most the first hundred rows of a file are read; nothing is read of a source on the hub.
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
    """Read the first usable row of every local source and render it with the chat template.

    Returns rows of the RL split, then of the evaluation split, by configuration path. A ConfigError
    if a column is missing, no row is usable or the template fails.
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
    """Return a row with a prompt, read or generated; None if all data are on the hub."""
    return next(iter(rows.values()), None) or generated_row(data)


def show_images(data: DataConfig, rows: Mapping[str, RLRow], section: str) -> list[str]:
    """Return configuration paths of the sources whose first row or layout has images."""
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
    """Return the sources without ground truth in their first row or layout, by configuration path.

    The value is the first row, or None for a source on the hub.
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
    """Raise a ConfigError if the chat template renders a prompt to no tokens."""
    if not render_prompts(tokenizer, [row.prompt])[0]:
        raise ConfigError(
            "model.chat_template",
            "renders the first prompt to 0 tokens; need a template that writes the messages; set "
            "model.chat_template",
        )


def generated_row(data: DataConfig) -> RLRow | None:
    """Return one row of generated data; None if none is generated."""
    if data.arithmetic is None:
        return None
    few = data.arithmetic.model_copy(update={"num_sft": 1, "num_rl": 1, "num_eval": 1})
    return generate(few, seed=0).rl[0]


def _local(data: DataConfig, section: str, splits: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (configuration path, index in its split) of the local sources."""
    return [
        (f"{section}.{split}.{place}", place)
        for split in splits
        for place, source in enumerate(getattr(data, split))
        if local_path(source.path)
    ]
