"""Rows that are too long for the model are left out, or stop everything.

Promises: they are those that the training stages would leave out
(`engines.data.read.examples`, `engines.data.read.pairs`), in the same words; of token ids one
batch is in memory, of the rows their lengths.
A row that shows images stays: how long it is is a matter of the model's image processor, and the
stage that samples refuses one that does not fit.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from engines.config.data import DataConfig
from engines.data.prepare.splits import Splits
from engines.data.prepare.stored_rows import StoredRows
from engines.data.read.chat import render_conversations, render_prompts
from engines.data.read.examples import OnOverlong, fitting_conversations, fitting_prompts
from engines.data.read.pairs import as_policy, fitting_pairs, longer_sides
from engines.data.read.row_files import RowT, in_batches
from engines.data.read.rows import PreferenceRow, RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer

_FITS = 1
"""Tokens of a row that stays, whatever the limit."""


def without_overlong(
    splits: Splits, data: DataConfig, max_length: int, tokenizer: ChatTokenizer
) -> Splits:
    """The splits without the rows that are too long.

    Args:
        splits: that were read.
        data: `max_prompt_length`, and what happens to a row that is longer.
        max_length: most tokens of a conversation (`model.max_length`).
        tokenizer: with a chat template.

    Returns:
        The others, in their order.

    Raises:
        ConfigError: a row is too long and none may be dropped, or none is left of a split.
    """

    def fitting(
        rows: StoredRows[RowT],
        lengths: Callable[[Sequence[RowT], ChatTokenizer], Iterable[int]],
        limit: int,
        choose: Callable[[Sequence[int], int, OnOverlong], list[int]],
    ) -> StoredRows[RowT]:
        if not len(rows):
            return rows
        all_lengths = array("q")
        for batch in in_batches(rows):
            all_lengths.extend(lengths(batch, tokenizer))
        chosen = np.zeros(len(all_lengths), bool)
        chosen[choose(all_lengths, limit, data.on_overlong)] = True
        return rows.only(chosen)

    longest = data.max_prompt_length
    return replace(
        splits,
        sft=fitting(splits.sft, _of_conversations, max_length, fitting_conversations),
        preference=fitting(splits.preference, _of_pairs, max_length, fitting_pairs),
        preference_evaluation=fitting(
            splits.preference_evaluation, _of_pairs, max_length, fitting_pairs
        ),
        rl=fitting(splits.rl, _of_prompts, longest, fitting_prompts),
        evaluation=fitting(splits.evaluation, _of_prompts, longest, fitting_prompts),
    )


def _of_conversations(rows: Sequence[SFTRow], tokenizer: ChatTokenizer) -> Iterable[int]:
    rendered = render_conversations(tokenizer, [row.messages for row in rows])
    return (len(each.input_ids) for each in rendered)


def _of_prompts(rows: Sequence[RLRow], tokenizer: ChatTokenizer) -> Iterable[int]:
    texts = iter(render_prompts(tokenizer, [row.prompt for row in rows if not row.images]))
    return [_FITS if row.images else len(next(texts)) for row in rows]


def _of_pairs(rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer) -> Iterable[int]:
    return longer_sides([len(side.input_ids) for side in as_policy(rows, tokenizer)])
