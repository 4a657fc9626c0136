"""Tokenize preference rows for the losses over pairs.

Promises: both answers of a pair fit, or the pair is left out and counted; ids and order are a pure
function of rows and tokenizer.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.data.read.chat import RenderedConversation, render_conversations, render_whole
from engines.data.read.examples import OnOverlong, within
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
    """Tokenized pairs of the `kept` rows, 5 bytes per token; each `Pair` is made on access.

    `sides` is in the order of `Render`; an unknown margin is NaN.
    """

    def __init__(
        self,
        sides: PackedConversations,
        margins: Sequence[float],
        data_sources: Sequence[str],
        kept: Sequence[int],
    ) -> None:
        self._sides, self._margins, self._kept = sides, array("d", margins), array("q", kept)
        longer = longer_sides(sides.lengths)
        self.lengths = array("q", (longer[row] for row in kept))
        """Tokens of the longer conversation of each pair."""
        self.data_sources = [data_sources[row] for row in kept]

    def __len__(self) -> int:
        return len(self._kept)

    def at(self, place: int) -> Pair:
        """Return one pair."""
        row = self._kept[place]
        chosen, rejected = self._sides[2 * row : 2 * row + 2]
        margin = self._margins[row]
        known = None if math.isnan(margin) else margin
        return Pair(row, chosen, rejected, known, self.data_sources[place])


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
    rows: Iterable[PreferenceRow],
    tokenizer: ChatTokenizer,
    max_length: int,
    render: Render,
    on_overlong: OnOverlong | None = None,
) -> Pairs:
    """Tokenize pairs and return, in row order, those with both conversations within `max_length`.

    `rows` are read once and may be empty; `render` is `as_policy` or `as_reward_model`. Overlong
    pairs are handled as `within` does.
    """
    sides = PackedConversations()
    margins, sources = array("d"), list[str]()
    for batch in in_batches(rows):
        for rendered in render(batch, tokenizer):
            sides.append(rendered)
        margins.extend(math.nan if row.margin is None else row.margin for row in batch)
        sources += [sys.intern(row.data_source) for row in batch]
    longer = longer_sides(sides.lengths)
    kept = fitting_pairs(longer, max_length, on_overlong) if longer else []
    return Pairs(sides, margins, sources, kept)


def longer_sides(lengths: Sequence[int]) -> list[int]:
    """Return the tokens of the longer conversation of each pair; see `Render` for the order."""
    return list(map(max, lengths[::2], lengths[1::2]))


def pair_lengths(rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer) -> list[int]:
    """Return the tokens of the longer conversation of each pair, rendered by `as_policy`."""
    return longer_sides([len(side.input_ids) for side in as_policy(rows, tokenizer)])


def fitting_pairs(
    lengths: Sequence[int], max_length: int, on_overlong: OnOverlong | None
) -> list[int]:
    """Return the indices of the pairs that fit; see `engines.data.read.examples.within`."""
    return within(lengths, max_length, on_overlong, ("model.max_length", "pairs"))


def _last_answer(conversation: RenderedConversation) -> RenderedConversation:
    mask = conversation.loss_mask
    end = next((place for place in range(len(mask), 0, -1) if mask[place - 1]), 0)
    start = next((place for place in range(end, 0, -1) if not mask[place - 1]), 0)
    last = tuple(int(start <= place < end) for place in range(len(mask)))
    return RenderedConversation(conversation.input_ids, last)
