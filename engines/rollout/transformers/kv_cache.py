"""Key-value cache of a running batch: one row per sample, every row starting at position 0.

Promises: a decode step writes one position per row in place and reads views without copies. The
rows in use are always 0 .. B-1. The attention mask must hide positions beyond a row's length.
Letters: B rows, P sequences, G key-value heads, L positions, D head width.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LENGTH_STEP = 32
"""Positions are allocated in multiples of this."""


class KVCache:
    """Keys and values of every layer, as growing (rows, G, positions, D) buffers."""

    def __init__(self, num_layers: int, max_rows: int, max_length: int) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._num_rows = 0
        self.length = 0
        """Positions allocated per row."""

    @property
    def size_bytes(self) -> int:
        """Memory held now."""
        return sum(t.numel() * t.element_size() for kv in self._layers if kv for t in kv)

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for `num_rows` rows of `length` positions; keeps what is stored."""
        if num_rows <= self._num_rows and length <= self.length:
            return
        if num_rows > self._num_rows:
            num_rows = max(num_rows, min(self._num_rows * 3 // 2, self._max_rows))
        if length > self.length:
            length = max(length, min(self.length * 3 // 2, self._max_length))
            length = -(-length // LENGTH_STEP) * LENGTH_STEP
        self._num_rows = max(num_rows, self._num_rows)
        self.length = max(length, self.length)
        for index, layer in enumerate(self._layers):
            if layer is not None:
                self._layers[index] = (self._grown(layer[0]), self._grown(layer[1]))

    def write_prefixes(
        self, layer: int, first_row: int, keys_BGLD: Tensor, values_BGLD: Tensor
    ) -> None:
        """Store the first L positions of rows `first_row` .. `first_row + B - 1`."""
        num_rows, _, length, _ = keys_BGLD.shape
        if not num_rows:
            return
        stored = self._layers[layer]
        if stored is None:
            stored = (self._empty(keys_BGLD), self._empty(values_BGLD))
            self._layers[layer] = stored
        rows = slice(first_row, first_row + num_rows)
        stored[0][rows, :, :length] = keys_BGLD
        stored[1][rows, :, :length] = values_BGLD

    def append(
        self, layer: int, keys_BG1D: Tensor, values_BG1D: Tensor, slot_BG: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Write one position of rows 0 .. B-1; return views (B, G, length, D) of keys and values.

        `slot_BG` (B * G,) int64 is from `slots`; `length` includes the new position.
        """
        stored = self._layers[layer]
        if stored is None:
            raise RuntimeError(f"layer {layer} has no prefix yet")
        num_rows = keys_BG1D.shape[0]
        views = []
        for buffer, new in zip(stored, (keys_BG1D, values_BG1D), strict=True):
            width = buffer.shape[-1]
            buffer.view(-1, width).index_copy_(0, slot_BG, new.reshape(-1, width))
            views.append(buffer[:num_rows, :, :length])
        return views[0], views[1]

    def slots(self, position_B: Tensor, num_kv_heads: int) -> Tensor:
        """Return (B * G,) int64: where `append` puts position `position_B` of each row and head."""
        row_head = torch.arange(position_B.numel() * num_kv_heads, device=position_B.device)
        return row_head * self.length + position_B.repeat_interleave(num_kv_heads)

    def move(self, source_rows: Sequence[int], target_rows: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of some rows over others."""
        if not source_rows:
            return
        for layer in self._layers:
            if layer is None:
                continue
            for buffer in layer:
                view = buffer[:, :, :length]
                source = torch.tensor(source_rows, device=buffer.device)
                target = torch.tensor(target_rows, device=buffer.device)
                view.index_copy_(0, target, view.index_select(0, source))

    def read_row(self, row: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return a copy of one row's first positions, (1, G, length, D) per layer."""
        return [
            (
                layer[0][row : row + 1, :, :length].clone(),
                layer[1][row : row + 1, :, :length].clone(),
            )
            for layer in self._layers
            if layer is not None
        ]

    def free(self) -> None:
        """Drop all buffers."""
        self._layers = [None] * len(self._layers)
        self._num_rows = self.length = 0

    def _empty(self, like_BGLD: Tensor) -> Tensor:
        _, heads, _, width = like_BGLD.shape
        shape = (self._num_rows, heads, self.length, width)
        # Zeros, because masked garbage still enters the weighted sum with weight 0: 0 * NaN is NaN.
        if like_BGLD.device.type != "cpu":
            return like_BGLD.new_zeros(shape)
        # numpy's zeros are cleared by the kernel on first touch; most pages are never touched.
        num_bytes = math.prod(shape) * like_BGLD.element_size()
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like_BGLD.dtype).view(shape)

    def _grown(self, buffer: Tensor) -> Tensor:
        rows, _, length, _ = buffer.shape
        grown = self._empty(buffer)
        grown[:rows, :, :length] = buffer
        return grown
