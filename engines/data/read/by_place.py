"""Sequences whose items are made when they are asked for."""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item", covariant=True)
Given = TypeVar("Given")


class ByPlace(Sequence[Item]):
    """Of a million rows a few are Python objects; the subclass says how long it is, and `at`."""

    @abstractmethod
    def at(self, place: int) -> Item:
        """The item at a place, counted from 0."""

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | Sequence[Item]:
        places = range(len(self))[place]
        return self.at(places) if isinstance(places, int) else [self.at(each) for each in places]


class Chosen(ByPlace[Item]):
    """Some of a sequence.

    Args:
        items: the sequence.
        places: of those that are chosen.
    """

    def __init__(self, items: Sequence[Item], places: Sequence[int]) -> None:
        self._items, self._places = items, array("q", places)

    def __len__(self) -> int:
        return len(self._places)

    def at(self, place: int) -> Item:
        """One of those."""
        return self._items[self._places[place]]


class Made(ByPlace[Item]):
    """Something of each of a sequence.

    Args:
        items: the sequence; iterating goes through it once.
        make: of one of them.
    """

    def __init__(self, items: Sequence[Given], make: Callable[[Given], Item]) -> None:
        self._num_items = len(items)
        self._at = lambda place: make(items[place])
        self._all = lambda: map(make, items)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[Item]:
        return self._all()

    def at(self, place: int) -> Item:
        """Of one."""
        return self._at(place)
