"""Host memory for checkpoint copies, reused by the next checkpoint.

Fresh memory costs more than the copy, because the operating system provides it page by page. So a
rank keeps one more copy of its state on the host. A lent buffer is not lent again.
"""

import torch
from torch import Tensor


class StagingBuffers:
    """Buffers by key; pinned if the values come from an accelerator."""

    def __init__(self) -> None:
        self._free: dict[object, Tensor] = {}

    def copy(self, key: object, value: Tensor) -> Tensor:
        """Return a contiguous CPU copy, lent until `give_back`; each tensor has its own `key`."""
        # pop is atomic, so that no other thread can take the same buffer.
        buffer = self._free.pop(key, None)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pinned = value.device.type != "cpu"
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        return buffer.copy_(value)

    def give_back(self, key: object, buffer: Tensor) -> None:
        """Return a buffer that `copy` lent under this key; it must not be read any more."""
        self._free[key] = buffer
