"""Rows to token ids: what the training and rollout loops consume.

Promises: no sequence longer than its limit gets through, none is cut, and every one left out is
counted; ids and order are a pure function of rows and tokenizer. How long a prompt may be says
whoever asks for it.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.data.read.by_place import ByPlace, Chosen
from engines.data.read.chat import RenderedConversation, render_conversations, render_prompts
from engines.data.read.packed import PackedConversations, PackedTokens
from engines.data.read.row_files import in_batches
from engines.data.read.rows import RLRow, RowError, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError

OnOverlong = Literal["error", "drop"]
"""As `data.on_overlong` says."""
Choose = Callable[[Sequence[int]], Sequence[int]]
"""Given the tokens of each sequence, the places of those to keep, ascending."""
Expanded = Callable[[RLRow, Sequence[int]], tuple[int, ...]]
"""Token ids of a row's prompt, each placeholder of an image as often as the model wants it; raises
`RowError` where they do not fit its images."""


@dataclass(frozen=True)
class SFTExamples:
    """The tokenized supervised split.

    Attributes:
        examples: in row order.
        lengths: of each, in tokens.
        indices: the row of each example.
        data_sources: of each example.
    """

    examples: Sequence[RenderedConversation]
    lengths: Sequence[int]
    indices: Sequence[int]
    data_sources: Sequence[str]


@dataclass(frozen=True)
class RLPrompt:
    """One tokenized prompt.

    Attributes:
        index: of the row in its split: the prompt's stable identity.
        row: what the reward needs.
        prompt_ids: token ids, ending with the opening of the assistant's turn.
    """

    index: int
    row: RLRow
    prompt_ids: tuple[int, ...]


class RLPrompts(ByPlace[RLPrompt]):
    """The prompts of a split: their ids in memory, a row when it is asked for.

    Args:
        rows: of the split.
        prompt_ids: of each row.
        data_sources: of each row.
        kept: the places of those rows that are prompts here, ascending.
        shows_images: of each row, 1 or 0.
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
        lengths = prompt_ids.lengths
        self.lengths = array("q", (lengths[place] for place in kept))
        """Tokens of each prompt."""
        self.data_sources = [data_sources[place] for place in kept]
        self.num_with_images = sum(shows_images[place] for place in kept)
        """Prompts that show images."""

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
        """One prompt, its row read now."""
        row = self._kept[place]
        return RLPrompt(row, self._rows[row], self._prompt_ids[row])


def sft_examples(
    rows: Iterable[SFTRow],
    tokenizer: ChatTokenizer,
    max_length: int,
    on_overlong: OnOverlong | None = None,
) -> SFTExamples:
    """Tokenize supervised rows.

    Args:
        rows: at least one; read once.
        tokenizer: with a chat template.
        max_length: most tokens of one conversation (`model.max_length`).
        on_overlong: see `within`.

    Returns:
        The examples that fit, in row order.

    Raises:
        ConfigError: a conversation is too long, or none is left.
    """
    packed = PackedConversations()
    sources: list[str] = []
    for batch in in_batches(rows):
        sources += [sys.intern(row.data_source) for row in batch]
        for rendered in render_conversations(tokenizer, [row.messages for row in batch]):
            packed.append(rendered)
    lengths = packed.lengths
    kept = fitting_conversations(lengths, max_length, on_overlong)
    return SFTExamples(
        Chosen(packed, kept), [lengths[i] for i in kept], kept, [sources[i] for i in kept]
    )


def rl_prompts(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    choose: Choose | None = None,
    expanded: Expanded | None = None,
) -> RLPrompts:
    """Tokenize the prompts of RL or evaluation rows.

    Args:
        rows: at least one; of those that are asked for later each is taken again.
        tokenizer: with a chat template.
        choose: of their tokens, chat template included, which are kept; None: all.
        expanded: makes room for the images of a row; None where nobody sees any.

    Returns:
        The prompts that are kept, in row order.

    Raises:
        ConfigError: a prompt has no token, or shows images that nobody sees or that do not fit it;
            or of `choose`.
    """
    packed = PackedTokens()
    sources: list[str] = []
    shows_images = bytearray()
    for batch in in_batches(rows):
        sources += [sys.intern(row.data_source) for row in batch]
        rendered = render_prompts(tokenizer, [row.prompt for row in batch])
        for row, ids in zip(batch, rendered, strict=True):
            packed.append(_expanded(row, ids, len(packed), expanded))
            shows_images.append(bool(row.images))
    lengths = packed.lengths
    _refuse_empty(lengths)
    kept = range(len(lengths)) if choose is None else choose(lengths)
    return RLPrompts(rows, packed, sources, kept, shows_images)


def _expanded(
    row: RLRow, prompt_ids: Sequence[int], place: int, expanded: Expanded | None
) -> tuple[int, ...]:
    if expanded is not None:
        try:
            return expanded(row, prompt_ids)
        except RowError as error:
            raise ConfigError("data", f"row {place} of the split: {error}") from None
    if row.images:
        raise ConfigError(
            "data",
            f"row {place} of the split shows images, which this stage does not read; need text; "
            "leave out such rows",
        )
    return tuple(prompt_ids)


def fitting_conversations(
    lengths: Sequence[int], max_length: int, on_overlong: OnOverlong | None
) -> list[int]:
    """Which supervised rows fit; see `within`."""
    return within(lengths, max_length, on_overlong, ("model.max_length", "conversations"))


def fitting_prompts(
    lengths: Sequence[int], max_prompt_length: int, on_overlong: OnOverlong
) -> list[int]:
    """Which prompts fit; see `within`.

    Args:
        lengths: of each, in tokens.
        max_prompt_length: most tokens of one.
        on_overlong: `error`, or `drop` and count.

    Returns:
        Their places, ascending.

    Raises:
        ConfigError: a prompt has no token, one does not fit, or none does.
    """
    _refuse_empty(lengths)
    return within(lengths, max_prompt_length, on_overlong, ("data.max_prompt_length", "prompts"))


def _refuse_empty(lengths: Sequence[int]) -> None:
    if 0 in lengths:
        raise ConfigError(
            "model.chat_template",
            f"renders {lengths.count(0)} of {len(lengths)} prompts to 0 tokens (first row "
            f"{lengths.index(0)}); need a template that writes the messages; set another",
        )


def within(
    lengths: Sequence[int], limit: int, on_overlong: OnOverlong | None, what: tuple[str, str]
) -> list[int]:
    """Which sequences fit.

    Args:
        lengths: of each, in tokens.
        limit: most tokens.
        on_overlong: what the recipe says, to whoever makes the data; None: of a stage that reads
            them, for which it says nothing, and which refuses.
        what: the setting of the limit, and what the sequences are called.

    Returns:
        Their places, ascending.

    Raises:
        ConfigError: one does not fit, or none does.
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
        raise ConfigError(field, f"0 of {len(lengths)} {noun} have at most {limit} tokens")
    return kept
