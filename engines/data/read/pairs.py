"""Tokenize preference rows for the losses over pairs.

Promises: both answers of a pair fit, or the rows are refused; ids and order are a pure function of
rows and tokenizer.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.data.read.chat import RenderedConversation, render_conversations, render_whole
from engines.data.read.examples import PAIRS, within
from engines.data.read.lazy_sequence import ByPlace, PackedConversations
from engines.data.read.row_files import in_batches
from engines.data.read.rows import PreferenceRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError


@dataclass(frozen=True)
class Pair:
    """Two tokenized answers with their prompt; `margin` is None if unknown."""

    index: int
    chosen: RenderedConversation
    rejected: RenderedConversation
    margin: float | None
    data_source: str


class Pairs(ByPlace[Pair]):
    """Tokenized pairs, 5 bytes per token; each `Pair` is made on access.

    `sides` is in the order of `Render`; an unknown margin is NaN. `lengths` has the tokens of the
    longer conversation of each pair.
    """

    def __init__(
        self, sides: PackedConversations, margins: Sequence[float], data_sources: Sequence[str]
    ) -> None:
        self._sides, self._margins = sides, margins
        self.data_sources = data_sources
        self.lengths = array("q", longer_sides(sides.lengths))

    def __len__(self) -> int:
        return len(self._margins)

    def at(self, place: int) -> Pair:
        """Return one pair."""
        chosen, rejected = self._sides[2 * place : 2 * place + 2]
        margin = self._margins[place]
        known = None if math.isnan(margin) else margin
        return Pair(place, chosen, rejected, known, self.data_sources[place])


Render = Callable[[Sequence[PreferenceRow], ChatTokenizer], Sequence[RenderedConversation]]
"""For each row in turn, returns the chosen conversation and the rejected one."""


def as_policy(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer
) -> Sequence[RenderedConversation]:
    """Tokenize pairs as a policy reads them (see `Render`): only the last answer has loss mask 1.

    Earlier answers in the prompt are common to both sides and were not chosen.
    """
    both = [conversation for row in rows for conversation in row.conversations]
    return [_last_answer(each) for each in render_conversations(tokenizer, both)]


def as_reward_model(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer
) -> Sequence[RenderedConversation]:
    """Tokenize pairs as a reward model reads them: only the last token has loss mask 1.

    Raises:
        ConfigError: a conversation has fewer than two tokens.
    """
    both = [conversation for row in rows for conversation in row.conversations]
    whole = render_whole(tokenizer, both)
    shortest = min(map(len, whole))
    if shortest < 2:
        raise ConfigError(
            "model.chat_template",
            f"renders an answer of the pairs with its prompt to {shortest} tokens; need a template "
            "that writes the messages; set another",
        )
    return [RenderedConversation(ids, (*([0] * (len(ids) - 1)), 1)) for ids in whole]


def read_pairs(
    rows: Iterable[PreferenceRow], tokenizer: ChatTokenizer, max_length: int, render: Render
) -> Pairs:
    """Tokenize pairs in row order with `render`, which is `as_policy` or `as_reward_model`.

    `rows` are read once and may be empty.

    Raises:
        ConfigError: a conversation has more than `max_length` tokens.
    """
    sides = PackedConversations()
    margins, sources = array("d"), list[str]()
    for batch in in_batches(rows):
        for rendered in render(batch, tokenizer):
            sides.append(rendered)
        margins.extend(math.nan if row.margin is None else row.margin for row in batch)
        sources += [sys.intern(row.data_source) for row in batch]
    pairs = Pairs(sides, margins, sources)
    if sources:
        within(pairs.lengths, max_length, None, PAIRS)
    return pairs


def longer_sides(lengths: Sequence[int]) -> list[int]:
    """Return the tokens of the longer conversation of each pair; see `Render` for the order."""
    return list(map(max, lengths[::2], lengths[1::2]))


def pair_lengths(rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens of the longer conversation of each pair, rendered by `as_policy`."""
    return longer_sides([len(side.input_ids) for side in as_policy(rows, tokenizer)])


def _last_answer(conversation: RenderedConversation) -> RenderedConversation:
    mask = conversation.loss_mask
    end = next((place for place in range(len(mask), 0, -1) if mask[place - 1]), 0)
    start = next((place for place in range(end, 0, -1) if not mask[place - 1]), 0)
    last = tuple(int(start <= place < end) for place in range(len(mask)))
    return RenderedConversation(conversation.input_ids, last)
