"""Rectangles of weights, as ranks hold them and senders name them.

Promises: plain data; imports no engine and no transport.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class WeightPlace:
    """A rectangle at `offsets` in a weight of shape `whole`; `name` is the weight's hub name."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, *numbers: Sequence[int]) -> "WeightPlace":
        """Rebuild a place from `astuple`, also after JSON turned its tuples into lists."""
        return cls(name, *(tuple(each) for each in numbers))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the whole weight."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True)
        )

    @property
    def num_values(self) -> int:
        """Number of values in the rectangle."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightShard:
    """A rectangle of a weight and its values; the rank with `is_owner` owns it, others have copies.

    `values` is read-only, on the device, and valid until the next shard is requested.
    """

    place: WeightPlace
    values: Tensor
    is_owner: bool


def whole_place(name: str, tensor: Tensor) -> WeightPlace:
    """Return the place of a tensor that is not sharded."""
    shape = tuple(tensor.shape)
    return WeightPlace(name, shape, (0,) * len(shape), shape)


def local_place(name: str, tensor: Tensor) -> WeightPlace:
    """Return the place of this rank's shard of a tensor; its shape may be empty."""
    if not isinstance(tensor, DTensor):
        return whole_place(name, tensor)
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return WeightPlace(name, tuple(tensor.shape), tuple(offsets), tuple(shape))


def local_values(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
