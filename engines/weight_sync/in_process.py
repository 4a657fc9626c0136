"""Passes weights from a trainer to a rollout engine in its process, or from a file to any engine.

Promises: tensors are gathered and cast in the trainer's thread, and passed to the engine's without
a further copy. At most one tensor waits while another is read. If one side fails, the other ends
with a `WeightSyncError`. The writer of a safetensors file keeps it until the receivers are done.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.checkpoint.hub_names import served_float32_names
from engines.checksum import ChecksumMethod, method_on
from engines.errors import WeightSyncError
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.buckets import CastStream
from infra.errors import DeadlineError


class InProcessTransport:
    """Transport and source in one object; casts to `dtype`, except `float32_names`."""

    def __init__(
        self,
        dtype: str,
        timeout_s: float,
        float32_names: Collection[str] = (),
        checksum_method: ChecksumMethod = "xxh3",
    ) -> None:
        self.checksum_method: ChecksumMethod = checksum_method
        self._float32_names = float32_names
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._offered: tuple[tuple[str, Tensor] | None, ...] = ()
        self._over = False
        self.sources = (self,)

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`."""
        stream = CastStream(tensors, self._dtype, self._float32_names, self.checksum_method)
        try:
            for item in chain(stream, [None]):
                self._put(item)
        finally:
            self.stop()
        return stream.sent

    def stop(self) -> None:
        """See `Transport`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        try:
            while (item := self._take()) is not None:
                yield item
        finally:
            self.stop()

    def of_worker(self, worker: int) -> "InProcessTransport":
        """See `WeightSource`; the engine of this process has one worker."""
        if worker != 0:
            raise WeightSyncError(f"worker {worker} is not in the process of the trainer")
        return self

    def _put(self, item: tuple[str, Tensor] | None) -> None:
        """Offer an item and wait until it was taken, so that at most one waits."""
        with self._changed:
            self._offered = (item,)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._over or not self._offered, self._timeout_s):
                raise DeadlineError("the rollout engine to take a tensor", self._timeout_s)
            if self._offered:
                raise ReceiverGoneError("the rollout engine gave up while it took weights")

    def _take(self) -> tuple[str, Tensor] | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._over or self._offered, self._timeout_s):
                raise DeadlineError("the trainer to send a tensor", self._timeout_s)
            if not self._offered:
                raise WeightSyncError("the trainer gave up while it sent weights")
            (item,), self._offered = self._offered, ()
            self._changed.notify_all()
            return item


def new_transport(
    hf_dir: Path, dtype: str, timeout_s: float, device_name: str = "cpu"
) -> Callable[[Sequence[int]], InProcessTransport]:
    """Return a function that makes a sync's transport; its argument has to be `[1]`, one worker.

    `device_name` is the torch device type of the engine.
    """
    float32_names = served_float32_names(hf_dir, getattr(torch, dtype))

    def new(num_workers: Sequence[int]) -> InProcessTransport:
        if list(num_workers) != [1]:
            raise ValueError(f"one engine shares this process, not {num_workers}")
        return InProcessTransport(dtype, timeout_s, float32_names, method_on(device_name))

    return new


@dataclass(frozen=True)
class SafetensorsSource:
    """Source that reads one safetensors file with every weight in the receiver's dtype."""

    path: Path

    @property
    def checksum_method(self) -> ChecksumMethod:
        """See `WeightSource`."""
        return "xxh3"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping: it has nothing but `keys`
                    yield name, file.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise WeightSyncError(f"{self.path}: {error}") from error

    def of_worker(self, worker: int) -> "SafetensorsSource":
        """See `WeightSource`; any number of workers may read the file."""
        return self
