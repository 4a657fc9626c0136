"""Tokenize rows for the training and rollout loops.

Promises: no sequence exceeds its limit and none is cut; ids and order are a pure function of rows
and tokenizer.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.data.read.chat import (
    RenderedConversation,
    render_conversations,
    render_prompts,
    render_whole,
)
from engines.data.read.lazy_sequence import ByPlace, PackedConversations, PackedTokens
from engines.data.read.row_files import in_batches
from engines.data.read.rows import PreferenceRow, RLRow, RowError, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError

OnOverlong = Literal["error", "drop"]
"""Values of `data.on_overlong`."""
CONVERSATIONS = ("model.max_length", "conversations")
"""Arguments `what` of `within`."""
PAIRS = ("model.max_length", "pairs")
PROMPTS = ("data.max_prompt_length", "prompts")
Choose = Callable[[Sequence[int]], Sequence[int]]
"""Given the length of each sequence in tokens, returns the indices to keep, ascending."""
Expanded = Callable[[RLRow, Sequence[int]], tuple[int, ...]]
"""Returns the prompt's token ids with each image placeholder repeated as often as the model needs;
raises `RowError` if the placeholders do not match the row's images."""


@dataclass(frozen=True)
class SFTExamples:
    """The tokenized supervised split in row order; `lengths` are in tokens."""

    examples: Sequence[RenderedConversation]
    lengths: Sequence[int]
    data_sources: Sequence[str]


@dataclass(frozen=True)
class RLPrompt:
    """One tokenized prompt; its ids end with the opening of the assistant's turn.

    `index` is the row index in the split, the stable identity of the prompt.
    """

    index: int
    row: RLRow
    prompt_ids: tuple[int, ...]


class RLPrompts(ByPlace[RLPrompt]):
    """The prompts of the `kept` rows of a split: token ids in memory, rows read on access.

    The other arguments cover all rows; `shows_images` has 1 or 0 for each.
    """

    def __init__(
        self,
        rows: Sequence[RLRow],
        prompt_ids: PackedTokens,
        data_sources: Sequence[str],
        kept: Sequence[int],
        shows_images: Sequence[int],
    ) -> None:
        self._rows, self._prompt_ids, self._kept = rows, prompt_ids, array("q", kept)
        self.lengths = array("q", map(prompt_ids.lengths.__getitem__, kept))
        """Tokens of each prompt."""
        self.data_sources = [data_sources[place] for place in kept]
        self.num_with_images = sum(shows_images[place] for place in kept)
        """Number of prompts with images."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[RLPrompt]:
        kept = iter(self._kept)
        wanted = next(kept, None)
        for place, row in enumerate(self._rows):  # one pass over the file
            if place == wanted:
                yield RLPrompt(place, row, self._prompt_ids[place])
                wanted = next(kept, None)

    def at(self, place: int) -> RLPrompt:
        """Return one prompt; reads its row."""
        row = self._kept[place]
        return RLPrompt(row, self._rows[row], self._prompt_ids[row])


def sft_examples(rows: Iterable[SFTRow], tokenizer: ChatTokenizer, max_length: int) -> SFTExamples:
    """Tokenize supervised rows, which are read once.

    Raises:
        ConfigError: there are no rows, or one has more than `max_length` tokens.
    """
    packed = PackedConversations()
    sources: list[str] = []
    for batch in in_batches(rows):
        sources += [sys.intern(row.data_source) for row in batch]
        for rendered in render_conversations(tokenizer, [row.messages for row in batch]):
            packed.append(rendered)
    lengths = packed.lengths
    within(lengths, max_length, None, CONVERSATIONS)
    return SFTExamples(packed, lengths, sources)


def rl_prompts(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    choose: Choose | None = None,
    expanded: Expanded | None = None,
) -> RLPrompts:
    """Tokenize the prompts of RL or evaluation rows and return those that are kept, in row order.

    Args:
        rows: each prompt reads its row again on access.
        choose: None keeps all.
        expanded: None for a model without images.

    Raises:
        ConfigError: a prompt has no tokens, or has images that do not match it or the model.
    """
    packed = PackedTokens()
    sources: list[str] = []
    shows_images = bytearray()
    for batch in in_batches(rows):
        sources += [sys.intern(row.data_source) for row in batch]
        rendered = render_prompts(tokenizer, [row.prompt for row in batch])
        for row, ids in zip(batch, rendered, strict=True):
            shown = f"row {len(packed)} of the stage's split (data_source {row.data_source!r})"
            if row.images and expanded is None:
                raise ConfigError(
                    "data",
                    f"{shown} shows images, which this stage does not read; need text; leave out "
                    "such rows",
                )
            try:
                packed.append(expanded(row, ids) if expanded else ids)
            except RowError as error:
                raise ConfigError("data", f"{shown}: {error}") from None
            shows_images.append(bool(row.images))
    lengths = packed.lengths
    refuse_empty(lengths)
    kept = range(len(lengths)) if choose is None else choose(lengths)
    return RLPrompts(rows, packed, sources, kept, shows_images)


def refuse_empty(lengths: Sequence[int]) -> None:
    """Raise `ConfigError` for prompts without tokens."""
    if 0 in lengths:
        raise ConfigError(
            "model.chat_template",
            f"renders {lengths.count(0)} of {len(lengths)} prompts to 0 tokens (first row "
            f"{lengths.index(0)}); need a template that writes the messages; set another",
        )


def within(
    lengths: Sequence[int], limit: int, on_overlong: OnOverlong | None, what: tuple[str, str]
) -> list[int]:
    """Return the indices of the sequences of at most `limit` tokens, ascending.

    Args:
        on_overlong: `drop` skips longer ones, `error` refuses them. None also refuses, for stages
            that read prepared data; the error then does not mention `data.on_overlong`.
        what: the setting of the limit and the plural noun of the sequences, for errors.

    Raises:
        ConfigError: one is too long and not dropped, or none fits.
    """
    field, noun = what
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    num_overlong = len(lengths) - len(kept)
    if num_overlong and on_overlong != "drop":
        remedies = {
            None: "raise it, or leave such rows out of the data",
            "error": "data.on_overlong is 'error'; raise the limit or set data.on_overlong=drop",
        }
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise ConfigError(
            field,
            f"{num_overlong} of {len(lengths)} {noun} exceed {limit} tokens (the longest, row "
            f"{longest}, has {lengths[longest]}); {remedies[on_overlong]}",
        )
    if not kept:
        raise ConfigError(
            field, f"0 of {len(lengths)} {noun} have at most {limit} tokens; raise it"
        )
    return kept


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
        margin = None if math.isnan(self._margins[place]) else self._margins[place]
        return Pair(place, chosen, rejected, margin, self.data_sources[place])


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
