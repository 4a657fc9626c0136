"""Rows to token ids: what the training and rollout loops consume.

Promises: no sequence longer than its limit gets through, none is cut, and every one left out is
counted; ids and order are a pure function of rows and tokenizer.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from engines.data.read.chat import RenderedConversation, render_conversations, render_prompts
from engines.data.read.row_files import in_batches
from engines.data.read.rows import RLRow, SFTRow
from engines.data.read.tokenizer import ChatTokenizer
from infra.errors import ConfigError

OnOverlong = Literal["error", "drop"]
Expanded = Callable[[RLRow, Sequence[int]], tuple[int, ...]]
"""Token ids of a row's prompt, each placeholder of an image as often as the model wants it."""


class PackedConversations(Sequence[RenderedConversation]):
    """Conversations laid end to end, 5 bytes a token; each is made when it is asked for."""

    def __init__(self) -> None:
        self._input_ids = array("i")
        self._loss_mask = bytearray()
        self._ends = array("q", [0])

    def append(self, conversation: RenderedConversation) -> None:
        """The next one."""
        self._input_ids.extend(conversation.input_ids)
        self._loss_mask.extend(conversation.loss_mask)
        self._ends.append(len(self._input_ids))

    @property
    def lengths(self) -> Sequence[int]:
        """Of each, in tokens."""
        return array("q", map(int.__sub__, self._ends[1:], self._ends))

    def only(self, places: Sequence[int]) -> "PackedConversations":
        """Those at these places, ascending; this one where they are all."""
        if len(places) == len(self):
            return self
        chosen = PackedConversations()
        for place in places:
            chosen.append(self[place])
        return chosen

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> RenderedConversation: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[RenderedConversation]: ...

    def __getitem__(
        self, place: int | slice
    ) -> RenderedConversation | Sequence[RenderedConversation]:
        places = range(len(self))[place]
        if isinstance(places, range):
            return [self[each] for each in places]
        tokens = slice(self._ends[places], self._ends[places + 1])
        return RenderedConversation(tuple(self._input_ids[tokens]), tuple(self._loss_mask[tokens]))


@dataclass(frozen=True)
class SFTExamples:
    """The tokenized supervised split.

    Attributes:
        examples: in row order.
        indices: the row of each example.
        data_sources: of each example.
    """

    examples: Sequence[RenderedConversation]
    indices: tuple[int, ...]
    data_sources: tuple[str, ...]


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


def sft_examples(
    rows: Iterable[SFTRow],
    tokenizer: ChatTokenizer,
    max_length: int,
    on_overlong: OnOverlong = "error",
) -> SFTExamples:
    """Tokenize supervised rows.

    Args:
        rows: at least one; read once.
        tokenizer: with a chat template.
        max_length: most tokens of one conversation (`model.max_length`).
        on_overlong: `error`, or `drop` and count.

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
    kept = fitting_conversations(packed.lengths, max_length, on_overlong)
    return SFTExamples(packed.only(kept), tuple(kept), tuple(sources[i] for i in kept))


def rl_prompts(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    max_prompt_length: int,
    on_overlong: OnOverlong = "error",
    expanded: Expanded | None = None,
) -> tuple[RLPrompt, ...]:
    """Tokenize the prompts of RL or evaluation rows.

    Args:
        rows: at least one.
        tokenizer: with a chat template.
        max_prompt_length: most tokens of one prompt, chat template included.
        on_overlong: `error`, or `drop` and count.
        expanded: makes room for the images of a row; None where nobody sees any.

    Returns:
        The prompts that fit, in row order.

    Raises:
        ConfigError: a prompt has no token, is too long, shows images that nobody sees, or none is
            left.
    """
    prompt_ids = render_prompts(tokenizer, [row.prompt for row in rows])
    for place, row in enumerate(rows):
        if row.images and expanded is None:
            raise ConfigError(
                "data",
                f"row {place} of the split shows images, which this stage does not read; need "
                "text; leave out such rows",
            )
        if row.images and expanded is not None:
            prompt_ids[place] = expanded(row, prompt_ids[place])
    kept = fitting_prompts([len(ids) for ids in prompt_ids], max_prompt_length, on_overlong)
    return tuple(RLPrompt(i, rows[i], prompt_ids[i]) for i in kept)


def fitting_conversations(
    lengths: Sequence[int], max_length: int, on_overlong: OnOverlong
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
    if 0 in lengths:
        raise ConfigError(
            "model.chat_template",
            f"renders {lengths.count(0)} of {len(lengths)} prompts to 0 tokens (first row "
            f"{lengths.index(0)}); need a template that writes the messages; set another",
        )
    return within(lengths, max_prompt_length, on_overlong, ("data.max_prompt_length", "prompts"))


def within(
    lengths: Sequence[int], limit: int, on_overlong: OnOverlong, what: tuple[str, str]
) -> list[int]:
    """Which sequences fit.

    Args:
        lengths: of each, in tokens.
        limit: most tokens.
        on_overlong: `error`, or `drop` and count.
        what: the setting of the limit, and what the sequences are called.

    Returns:
        Their places, ascending.

    Raises:
        ConfigError: one does not fit, or none does.
    """
    field, noun = what
    kept = [index for index, length in enumerate(lengths) if length <= limit]
    num_overlong = len(lengths) - len(kept)
    if num_overlong and on_overlong == "error":
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise ConfigError(
            field,
            f"{num_overlong} of {len(lengths)} {noun} exceed {limit} tokens (the longest, row "
            f"{longest}, has {lengths[longest]}); data.on_overlong is 'error'; raise the limit or "
            "set data.on_overlong=drop",
        )
    if not kept:
        raise ConfigError(field, f"0 of {len(lengths)} {noun} have at most {limit} tokens")
    return kept
