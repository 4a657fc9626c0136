"""Rectangles of weights, as ranks hold them and senders name them.

Promises: plain data; nothing of an engine or a transport is imported here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightPlace:
    """A rectangle of a weight.

    Attributes:
        name: of the weight on the hub.
        whole: shape of the weight.
        offsets: of the rectangle in the weight.
        shape: of the rectangle.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, *numbers: Sequence[int]) -> "WeightPlace":
        """The place as `astuple` gave it, also if JSON made lists of its tuples."""
        return cls(name, *(tuple(each) for each in numbers))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the whole weight."""
        ends = zip(self.offsets, self.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)

    @property
    def num_values(self) -> int:
        """Of the rectangle."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightShard:
    """A rectangle of a weight and its values.

    Attributes:
        place: where it belongs.
        values: of `place.shape`, on the device; valid until the next shard is asked for, and not
            to be changed.
        is_owner: this is the rank that speaks for the rectangle; others hold copies of it.
    """

    place: WeightPlace
    values: Tensor
    is_owner: bool


def whole_place(name: str, tensor: Tensor) -> WeightPlace:
    """The place of a tensor that is no part of anything."""
    shape = tuple(tensor.shape)
    return WeightPlace(name, shape, (0,) * len(shape), shape)
