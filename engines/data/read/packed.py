"""Token ids of many texts in one array: 4 bytes per token, no Python object per text."""

from array import array
from collections.abc import Sequence

from engines.data.read.by_place import ByPlace
from engines.data.read.chat import RenderedConversation


class PackedTokens(ByPlace[tuple[int, ...]]):
    """Token ids of each text."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._ends = array("q", [0])

    def append(self, ids: Sequence[int]) -> None:
        """Add the next text."""
        self._ids.extend(ids)
        self._ends.append(len(self._ids))

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each text."""
        return array("q", map(int.__sub__, self._ends[1:], self._ends))

    def span(self, place: int) -> slice:
        """Return the slice of a text in the array of all tokens."""
        return slice(self._ends[place], self._ends[place + 1])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, place: int) -> tuple[int, ...]:
        """Return the ids of one text."""
        return tuple(self._ids[self.span(place)])


class PackedConversations(ByPlace[RenderedConversation]):
    """Conversations with their loss masks, 5 bytes per token."""

    def __init__(self) -> None:
        self._tokens = PackedTokens()
        self._loss_mask = bytearray()

    def append(self, conversation: RenderedConversation) -> None:
        """Add the next conversation."""
        self._tokens.append(conversation.input_ids)
        self._loss_mask.extend(conversation.loss_mask)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each conversation."""
        return self._tokens.lengths

    def __len__(self) -> int:
        return len(self._tokens)

    def at(self, place: int) -> RenderedConversation:
        """Return one conversation."""
        mask = tuple(self._loss_mask[self._tokens.span(place)])
        return RenderedConversation(self._tokens.at(place), mask)
