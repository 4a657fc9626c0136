"""Sequences that hold few Python objects: their items are made or read on access.

A parquet row group can only be read whole. So `MappedRows` copies the rows of a file once,
uncompressed, to a scratch file, from which a read loads a few rows. The file has no name, so it
disappears with the process; a full disk raises the operating system's error.
Token ids of many texts are in one array: 4 bytes per token, no Python object per text.
"""

import tempfile
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import pyarrow as pa

from engines.data.read.chat import RenderedConversation
from engines.data.read.row_files import RowFile, RowT

Item = TypeVar("Item", covariant=True)
Given = TypeVar("Given")


class ByPlace(Sequence[Item]):
    """A sequence that keeps few items as Python objects; subclasses define `__len__` and `at`."""

    @abstractmethod
    def at(self, place: int) -> Item:
        """Return the item at a 0-based index."""

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | Sequence[Item]:
        places = range(len(self))[place]
        return self.at(places) if isinstance(places, int) else [self.at(each) for each in places]


class Made(ByPlace[Item]):
    """The results of `make` for the items of a sequence, made anew on access or iteration."""

    def __init__(self, items: Sequence[Given], make: Callable[[Given], Item]) -> None:
        self._items: Sequence[Any] = items
        self._make: Callable[[Any], Item] = make

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, self._items)

    def at(self, place: int) -> Item:
        """Return one result."""
        return self._make(self._items[place])


_ROWS_PER_READ = 64


class MappedRows(ByPlace[RowT], Generic[RowT]):
    """The rows of a file, each read on access; `scratch_dir` needs room for their text."""

    def __init__(self, rows: RowFile[RowT], scratch_dir: Path) -> None:
        self._rows = rows
        self._starts = [0]
        self._scratch = tempfile.TemporaryFile(dir=scratch_dir)  # noqa: SIM115
        with pa.ipc.new_file(pa.PythonFile(self._scratch, "w"), rows.schema) as file:
            for batch in rows.batches():
                for start in range(0, batch.num_rows, _ROWS_PER_READ):
                    few = batch.slice(start, _ROWS_PER_READ)
                    file.write_batch(few)
                    self._starts.append(self._starts[-1] + few.num_rows)
        self._scratch.seek(0)
        self._file = pa.ipc.open_file(pa.PythonFile(self._scratch, "r"))

    def close(self) -> None:
        """Free the scratch file; afterwards `at` fails, and rows can still be iterated."""
        self._scratch.close()

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def at(self, place: int) -> RowT:
        """Read one row."""
        number = bisect_right(self._starts, place) - 1
        batch = self._file.get_batch(number)
        [columns] = batch.slice(place - self._starts[number], 1).to_pylist()
        return self._rows.parse(place, columns)


class PackedTokens(ByPlace[tuple[int, ...]]):
    """Token ids of many texts, in one array."""

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
        return RenderedConversation(
            self._tokens.at(place), tuple(self._loss_mask[self._tokens.span(place)])
        )
