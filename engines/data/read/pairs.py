"""Preference rows to token ids: what the losses over pairs consume.

Promises: both answers of a pair fit, or the pair is left out and counted; ids and order are a pure
function of rows and tokenizer. A policy reads pairs as SFT reads conversations; a reward model
reads the whole of its chat template, as it does when it scores.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.data.read.by_place import ByPlace
from engines.data.read.chat import RenderedConversation, render_conversations, render_whole
from engines.data.read.examples import OnOverlong, within
from engines.data.read.packed import PackedConversations
from engines.data.read.row_files import in_batches
from engines.data.read.rows import PreferenceRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError


@dataclass(frozen=True)
class Pair:
    """Two tokenized answers to one prompt.

    Attributes:
        index: of the row in its split.
        chosen: the better one, with its prompt.
        rejected: the other one.
        margin: by how much it is better; None where nobody said so.
        data_source: of the row.
    """

    index: int
    chosen: RenderedConversation
    rejected: RenderedConversation
    margin: float | None
    data_source: str


class Pairs(ByPlace[Pair]):
    """Tokenized pairs, 5 bytes a token; each is made when it is asked for.

    Args:
        sides: of each row the chosen conversation and the rejected one.
        margins: of each row; NaN where it has none.
        data_sources: of each row.
        kept: the places of those rows that are pairs here.
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
        """Tokens of the longer conversation of each."""
        self.data_sources = [data_sources[row] for row in kept]

    def __len__(self) -> int:
        return len(self._kept)

    def at(self, place: int) -> Pair:
        """One of them."""
        row = self._kept[place]
        chosen, rejected = self._sides[2 * row : 2 * row + 2]
        margin = self._margins[row]
        known = None if math.isnan(margin) else margin
        return Pair(row, chosen, rejected, known, self.data_sources[place])


Render = Callable[[Sequence[PreferenceRow], ChatTokenizer], Sequence[RenderedConversation]]
"""Of each row in turn the chosen conversation and the rejected one."""


def as_policy(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer
) -> Sequence[RenderedConversation]:
    """As a policy reads pairs: the loss mask is on what the assistant writes last.

    What the two have in common, earlier answers in the prompt among it, was not chosen.

    Args:
        rows: at least one.
        tokenizer: with a chat template.

    Returns:
        See `Render`.
    """
    both = [conversation for row in rows for conversation in row.conversations]
    return [_last_answer(each) for each in render_conversations(tokenizer, both)]


def as_reward_model(
    rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer
) -> Sequence[RenderedConversation]:
    """As a reward model reads them; the loss mask is 1 on the last token.

    Args:
        rows: at least one.
        tokenizer: with a chat template.

    Returns:
        See `Render`.

    Raises:
        ConfigError: a conversation is of less than two tokens.
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
    """Tokenized pairs, of those both of whose conversations fit: one alone would be no pair.

    Args:
        rows: none, or some; read once.
        tokenizer: with a chat template.
        max_length: most tokens of one conversation (`model.max_length`).
        render: who reads them: `as_policy` or `as_reward_model`.
        on_overlong: see `engines.data.read.examples.within`.

    Returns:
        In row order.

    Raises:
        ConfigError: a conversation is too long, or no pair is left; or of `render`.
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
    """Tokens of the longer conversation of each pair; see `Render`."""
    return list(map(max, lengths[::2], lengths[1::2]))


def pair_lengths(rows: Sequence[PreferenceRow], tokenizer: ChatTokenizer) -> list[int]:
    """Tokens of the longer conversation of each pair, as a policy reads them.

    Args:
        rows: at least one.
        tokenizer: with a chat template.

    Returns:
        One for each row; raises as `as_policy` does.
    """
    return longer_sides([len(side.input_ids) for side in as_policy(rows, tokenizer)])


def fitting_pairs(
    lengths: Sequence[int], max_length: int, on_overlong: OnOverlong | None
) -> list[int]:
    """Which pairs fit, by their longer side; see `engines.data.read.examples.within`."""
    return within(lengths, max_length, on_overlong, ("model.max_length", "pairs"))


def _last_answer(conversation: RenderedConversation) -> RenderedConversation:
    """With the mask on the last run of trained tokens alone."""
    mask = conversation.loss_mask
    end = next((place for place in range(len(mask), 0, -1) if mask[place - 1]), 0)
    start = next((place for place in range(end, 0, -1) if not mask[place - 1]), 0)
    last = tuple(int(start <= place < end) for place in range(len(mask)))
    return RenderedConversation(conversation.input_ids, last)
