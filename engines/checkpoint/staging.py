"""Host memory that a checkpoint is copied into, kept for the next one.

Fresh memory costs more than the copy: the operating system hands it out page by page. Kept, a
rank holds one more copy of its state on the host for as long as its engine lives.
Promises: memory that was lent is not lent again before it is given back, from whatever thread.
"""

import torch
from torch import Tensor


class StagingBuffers:
    """Buffers by key; pinned where the values come from an accelerator."""

    def __init__(self) -> None:
        self._free: dict[object, Tensor] = {}

    def copy(self, key: object, value: Tensor) -> Tensor:
        """Copy a value to the host.

        Args:
            key: the same for the same tensor of each checkpoint.
            value: on any device.

        Returns:
            A contiguous copy on the CPU, lent until it is given back.
        """
        # One step, so that no other thread can take the same buffer.
        buffer = self._free.pop(key, None)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            pinned = value.device.type != "cpu"
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        return buffer.copy_(value)

    def give_back(self, key: object, buffer: Tensor) -> None:
        """End a loan.

        Args:
            key: it was lent under.
            buffer: what `copy` returned; nobody reads it any more.
        """
        self._free[key] = buffer
