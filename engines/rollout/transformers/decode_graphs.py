"""Decode steps that are recorded, and then launched as a whole.

A decode step is hundreds of small kernels, which the host launches one by one. A platform with
`graph_capture` launches a recorded step at once, with the sizes and addresses of the recording:
sizes are rounded up, and `clear` is called before tensors move. Without it, sizes are exact.
Promises: a step of a new size runs as it is, which prepares tables and handles; the next one of
that size is recorded. Without memory for that, steps run as they are, with one warning.
"""

import logging
from collections.abc import Callable, Hashable

import torch

from hardware.base import GraphCapture

MAX_NUM_GRAPHS = 64
"""Recorded steps that are kept; the least recently used one makes room."""
SIZES_PER_DOUBLING = 4
"""Sizes between one power of two and the next: at most a quarter of a step is padding."""
logger = logging.getLogger(__name__)


class DecodeGraphs:
    """Recorded decode steps by size; `new_capture` returns the platform's recorder, or None."""

    def __init__(self, new_capture: Callable[[], GraphCapture | None]) -> None:
        self._new_capture = new_capture
        self._capture = new_capture()
        self._has_warned = False
        self._launches: dict[Hashable, Callable[[], None]] = {}
        self._last_size: Hashable = None

    def padded(self, number: int, multiple: int = 1) -> int:
        """Return the next size to record, a multiple of a number; `number` without graphs."""
        if self._capture is None:
            return number
        below = 2 ** (number - 1).bit_length() // 2
        step = max(multiple, below // SIZES_PER_DOUBLING)
        return -(-number // step) * step

    def run(self, size: Hashable, step: Callable[[], None]) -> None:
        """Run a step; `size` names all that its kernels depend on, values in tensors apart."""
        launch = self._launches.pop(size, None)
        if launch is None and size == self._last_size:
            launch = self._recorded(step)
        self._last_size = size
        if launch is None:
            step()
            return
        launch()
        self._launches[size] = launch  # as the last: the dictionary is in the order of use
        if len(self._launches) > MAX_NUM_GRAPHS:
            del self._launches[next(iter(self._launches))]

    def clear(self) -> None:
        """Forget all recorded steps; their memory can be returned by `empty_cache`."""
        self._launches.clear()
        self._last_size = None
        self._capture = self._new_capture()

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Return the launch of a step; None without graphs, and without memory until `clear`."""
        if self._capture is None:
            return None
        try:
            return self._capture(step)
        except torch.OutOfMemoryError as error:
            self._launches.clear()
            self._capture = None
            if not self._has_warned:
                logger.warning("decode steps are launched kernel by kernel: %s", error)
            self._has_warned = True
            return None
