"""Sequences whose items are made on access."""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

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


class Chosen(ByPlace[Item]):
    """The items of a sequence at the given indices."""

    def __init__(self, items: Sequence[Item], places: Sequence[int]) -> None:
        self._items, self._places = items, array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    def at(self, place: int) -> Item:
        """Return one item."""
        return self._items[self._places[place]]


class Made(ByPlace[Item]):
    """The results of `make` for each item of a sequence; iteration passes over the items once."""

    def __init__(self, items: Sequence[Given], make: Callable[[Given], Item]) -> None:
        self._num_items = len(items)
        self._at = lambda place: make(items[place])
        self._all = lambda: map(make, items)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[Item]:
        return self._all()

    def at(self, place: int) -> Item:
        """Return one result."""
        return self._at(place)
