"""Key-value cache of a running batch, within a limit of positions.

The cache has one row per sample, which starts at position 0; the rows in use are 0 .. B-1. All rows
have the length of the longest, so a position is allocated in every row.
Promises: a decode step writes one position per row in place and reads views without copies. What
fits by `fits` stays within the limit; old buffers of a layer are kept while it is enlarged.
Letters: B cache rows, G KV heads, L positions, D head width.
"""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

LENGTH_STEP = 32
"""Positions are allocated in multiples of this."""


class KVCache:
    """Keys and values of every layer, as growing (rows, G, positions, D) buffers.

    `length` positions are allocated per row; `max_positions` is the limit of all rows together.
    `before_replacing` is called before buffers are replaced or dropped.
    """

    def __init__(
        self,
        max_rows: int,
        max_length: int,
        max_positions: int = sys.maxsize,
        before_replacing: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_rows = self._largest_bytes = 0
        self.length = 0
        self.max_positions = max_positions
        self._before_replacing = before_replacing

    @property
    def num_positions(self) -> int:
        """Positions allocated in all rows together."""
        return self._num_rows * self.length

    @property
    def size_bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def fits(self, num_rows: int, length: int) -> bool:
        """Return True if `num_rows` rows of `length` positions are within the limit."""
        return self.positions(num_rows, length) <= self.max_positions

    @staticmethod
    def positions(num_rows: int, length: int) -> int:
        """Return the positions that `num_rows` rows of `length` positions take."""
        return num_rows * _rounded(length)

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for `num_rows` rows of `length` positions; keeps what is stored in them."""
        if num_rows <= self._num_rows and length <= self.length:
            return
        self._before_replacing()
        rows, positions = self._num_rows, self.length
        if num_rows > rows:
            rows = max(num_rows, min(rows * 3 // 2, self._max_rows))
        if length > positions:
            positions = _rounded(max(length, min(positions * 3 // 2, self._max_length)))
        if rows * positions > self.max_positions:
            rows, spare = num_rows, self.max_positions // num_rows
            positions = max(_rounded(length), min(positions, spare - spare % LENGTH_STEP))
        self._num_rows, self.length = rows, positions
        self._largest_bytes = max(self._largest_bytes, self.size_bytes)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._resized(keys), self._resized(values)

    def write_prefixes(
        self, layer: int, first_row: int, keys_BGLD: Tensor, values_BGLD: Tensor
    ) -> None:
        """Store the first L positions of rows `first_row` .. `first_row + B - 1`."""
        num_rows, _, length, _ = keys_BGLD.shape
        if not num_rows:
            return
        if layer not in self._layers:
            self._layers[layer] = self._empty(keys_BGLD), self._empty(values_BGLD)
        stored, rows = self._layers[layer], slice(first_row, first_row + num_rows)
        stored[0][rows, :, :length] = keys_BGLD
        stored[1][rows, :, :length] = values_BGLD

    def append(
        self, layer: int, keys_BG1D: Tensor, values_BG1D: Tensor, slot_BG: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Write one position of rows 0 .. B-1; return views (B, G, length, D) of keys and values.

        `slot_BG` (B * G,) int64 is from `slots`; `length` includes the new position.
        """
        stored = self._layers[layer]
        num_rows = keys_BG1D.shape[0]
        for buffer, new in zip(stored, (keys_BG1D, values_BG1D), strict=True):
            width = buffer.shape[-1]
            buffer.view(-1, width).index_copy_(0, slot_BG, new.reshape(-1, width))
        return stored[0][:num_rows, :, :length], stored[1][:num_rows, :, :length]

    def slots(self, position_B: Tensor, num_kv_heads: int) -> Tensor:
        """Return (B * G,) int64: where `append` puts position `position_B` of each row and head."""
        row_head = torch.arange(position_B.numel() * num_kv_heads, device=position_B.device)
        return torch.add(position_B.repeat_interleave(num_kv_heads), row_head, alpha=self.length)

    def move(self, source_rows: Sequence[int], target_rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some rows over others."""
        if not source_rows:
            return
        rows = torch.tensor([source_rows, target_rows])
        for buffer in self._buffers():
            view, rows = buffer[:, :, :length], rows.to(buffer.device)
            view.index_copy_(0, rows[1], view.index_select(0, rows[0]))

    def read_row(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return a copy of one row's first positions, (1, G, length, D) per layer."""
        only = slice(row, row + 1)
        return [
            (keys[only, :, :length].clone(), values[only, :, :length].clone())
            for _, (keys, values) in sorted(self._layers.items())
        ]

    def take_largest_bytes(self) -> int:
        """Return the largest size since the last call."""
        largest, self._largest_bytes = max(self._largest_bytes, self.size_bytes), 0
        return largest

    def free(self) -> None:
        """Drop all buffers."""
        self._before_replacing()
        self._largest_bytes = max(self._largest_bytes, self.size_bytes)
        self._layers.clear()
        self._num_rows = self.length = 0

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self._layers.values() for buffer in layer]

    def _empty(self, like_BGLD: Tensor) -> Tensor:
        _, heads, _, width = like_BGLD.shape
        shape = (self._num_rows, heads, self.length, width)
        # Zeros, because masked garbage still enters the weighted sum with weight 0: 0 * NaN is NaN.
        if like_BGLD.device.type != "cpu":
            return like_BGLD.new_zeros(shape)
        # numpy's zeros are cleared by the kernel on first touch; most pages are never touched.
        num_bytes = math.prod(shape) * like_BGLD.element_size()
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like_BGLD.dtype).view(shape)

    def _resized(self, buffer: Tensor) -> Tensor:
        resized = self._empty(buffer)
        rows, length = min(len(buffer), len(resized)), min(buffer.shape[2], resized.shape[2])
        resized[:rows, :, :length] = buffer[:rows, :, :length]
        return resized


def _rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
