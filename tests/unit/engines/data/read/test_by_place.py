"""Sequences whose items are made when they are asked for behave as tuples do."""

import pytest

from engines.data.read.lazy_sequence import Made

TUPLE = (0, 10, 20, 30, 40)


def test_places_slices_and_ends() -> None:
    items = Made(range(5), lambda number: 10 * number)
    assert (len(items), tuple(items), tuple(reversed(items))) == (5, TUPLE, TUPLE[::-1])
    assert [items[place] for place in (0, 4, -1, -5)] == [0, 40, 40, 0]
    for part in (slice(None), slice(1, 3), slice(-2, None), slice(None, None, -2), slice(9, 12)):
        assert tuple(items[part]) == TUPLE[part]
    for place in (5, -6):
        with pytest.raises(IndexError):
            items[place]


def test_each_item_is_made_per_access_and_once_per_iteration() -> None:
    made: list[int] = []
    items = Made((1, 2, 3), lambda number: made.append(number) or -number)
    assert (len(items), made) == (3, [])
    assert (items[1], items[1], made) == (-2, -2, [2, 2])
    made.clear()
    assert (list(items), made) == ([-1, -2, -3], [1, 2, 3])
