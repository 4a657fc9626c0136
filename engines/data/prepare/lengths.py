"""Drop rows that are too long for the model, or refuse them.

Promises: the same rows and errors as in the training stages (`engines.data.read.examples`,
`engines.data.read.pairs`); memory holds one batch of token ids, and the length of each row.
An image counts with the tokens that the model's processor gives its size. If that is unknown (a
text model, or no processor configuration), rows with images stay, and the stage that reads them
refuses them or the model.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from engines.config.data import DataConfig
from engines.data.images.store import ImageFolder
from engines.data.prepare.splits import Splits
from engines.data.prepare.stored_rows import StoredRows, image_folder
from engines.data.read.chat import render_conversations, render_prompts
from engines.data.read.examples import OnOverlong, fitting_conversations, fitting_prompts
from engines.data.read.pairs import fitting_pairs, pair_lengths
from engines.data.read.row_files import RowT, in_batches
from engines.data.read.rows import RLRow, RowError, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError

FindImageLength = Callable[[], Callable[[int, int], int] | None]
"""Called when a row has an image. Returns a function from width and height in pixels to the number
of placeholder tokens, which raises `RowError` for an unsupported shape; None if unknown.
"""

_FITS = 1
"""Length of a row that stays, whatever the limit."""


def without_overlong(
    splits: Splits,
    data: DataConfig,
    max_length: int,
    tokenizer: ChatTokenizer,
    image_length: FindImageLength | None = None,
) -> Splits:
    """Return the splits without the rows that are too long, in order.

    Limits are `max_length` (of `model`), for prompts `data.max_prompt_length`.

    Raises:
        ConfigError: a row is too long and `data.on_overlong` is `error`, a split becomes empty, or
            the model does not take an image's shape.
    """

    def fitting(
        split: str,
        rows: StoredRows[RowT],
        lengths: Callable[..., Iterable[int]],
        limit: int,
        choose: Callable[[Sequence[int], int, OnOverlong], list[int]],
    ) -> StoredRows[RowT]:
        if not len(rows):
            return rows
        found = _lengths(split, rows, partial(lengths, tokenizer=tokenizer))
        chosen = np.zeros(len(found), bool)
        chosen[choose(found, limit, data.on_overlong)] = True
        return rows.only(chosen)

    def fitting_of(split: str, rows: StoredRows[RLRow]) -> StoredRows[RLRow]:
        folder = image_folder(rows.path)
        lengths = partial(_of_prompts, folder=folder, image_length=image_length)
        return fitting(split, rows, lengths, data.max_prompt_length, fitting_prompts)

    return replace(
        splits,
        sft=fitting("sft", splits.sft, _of_conversations, max_length, fitting_conversations),
        preference=fitting(
            "preference", splits.preference, pair_lengths, max_length, fitting_pairs
        ),
        preference_evaluation=fitting(
            "preference_evaluation",
            splits.preference_evaluation,
            pair_lengths,
            max_length,
            fitting_pairs,
        ),
        rl=fitting_of("rl", splits.rl),
        evaluation=fitting_of("evaluation", splits.evaluation),
    )


def _lengths(
    split: str, rows: StoredRows[RowT], of_batch: Callable[[Sequence[RowT]], Iterable[int]]
) -> "array[int]":
    found = array("q")
    try:
        for batch in in_batches(rows):
            for length in of_batch(batch):
                found.append(length)
    except RowError as error:
        raise ConfigError(f"data.{split}", f"row {len(found)} of the split: {error}") from None
    return found


def _of_conversations(rows: Sequence[SFTRow], tokenizer: ChatTokenizer) -> Iterable[int]:
    rendered = render_conversations(tokenizer, [row.messages for row in rows])
    return (len(each.input_ids) for each in rendered)


def _of_prompts(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    folder: ImageFolder,
    image_length: FindImageLength | None,
) -> Iterator[int]:
    """Yield the tokens of prompts, with each placeholder counted as its image's tokens."""
    num_tokens = image_length() if image_length and any(row.images for row in rows) else None
    known = [row.prompt for row in rows if num_tokens or not row.images]
    texts = iter(render_prompts(tokenizer, known))
    for row in rows:
        if not row.images:
            yield len(next(texts))
        elif num_tokens is None:
            yield _FITS
        else:
            sizes = [folder.size(image.sha256) for image in row.images]
            yield len(next(texts)) + sum(num_tokens(*size) - 1 for size in sizes)
