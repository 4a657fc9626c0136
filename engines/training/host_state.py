"""Optimizer state that is kept in host memory and brought to the device for an optimizer step.

Each tensor keeps its host memory, pinned once: torch's allocator rounds that up to a power of two.
Copies run in two streams beside the computation, one for each direction, so that one part of the
state arrives while another is used and a third leaves. A tensor object stays the same; only its
storage changes.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hardware.base import CopyStream, PlatformBase


class HostState:
    """Moves tensors of one rank between its device and host memory that it keeps for them."""

    def __init__(self, platform: PlatformBase, inbound: CopyStream, outbound: CopyStream) -> None:
        self._platform = platform
        self._inbound, self._outbound = inbound, outbound
        self._hosts = WeakTensorKeyDictionary()

    @classmethod
    def of(cls, platform: PlatformBase) -> "HostState | None":
        """Return one for a platform; None if its device has no memory of its own."""
        inbound, outbound = platform.copy_stream(), platform.copy_stream()
        return cls(platform, inbound, outbound) if inbound and outbound else None

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor], device: torch.device | str) -> None:
        """Move tensors, or the shards of DTensors, to this rank's device or to the host."""
        if torch.device(device) == self._platform.device():
            self._bring(tensors)
            self._inbound.join()
        else:
            self._send(tensors)
            self._outbound.synchronize()

    @torch.no_grad()
    def visit(self, parts: Sequence[Sequence[Tensor]]) -> Iterator[int]:
        """Yield the index of each part while it is on the device; the next one arrives meanwhile.

        At most three parts are on the device at a time.
        """
        for i, part in enumerate(parts):
            if i == 0:
                self._bring(part)
            self._inbound.join()
            if i + 1 < len(parts):
                self._bring(parts[i + 1])
            yield i
            self._send(part)
        self._outbound.synchronize()

    def _bring(self, tensors: Iterable[Tensor]) -> None:
        device = self._platform.device()
        for local in map(_local, tensors):
            host = self._hosts.get(local)
            if host is not None and local.data_ptr() == host.data_ptr():
                arrived = torch.empty_like(host, device=device, pin_memory=False)
                self._inbound.copy(host, arrived)
                local.data = arrived

    def _send(self, tensors: Iterable[Tensor]) -> None:
        pinned = self._platform.device().type != "cpu"
        for local in map(_local, tensors):
            host = self._hosts.get(local)
            if host is None:
                host = torch.empty_like(local, device="cpu", pin_memory=pinned)
                self._hosts[local] = host
            if local.data_ptr() != host.data_ptr():
                self._outbound.copy(local.data, host)
                local.data = host


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor object that holds this rank's values; gradients must be off."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
