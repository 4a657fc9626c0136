"""Keeps what the backward pass needs in host memory instead of on the device.

A storage is copied once, however many tensors saved during one forward pass look at it. Copies run
in two streams beside the computation; while a storage is used in the backward pass, the one that
was saved before it is on its way back. Weights and small tensors stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hardware.base import CopyStream, PlatformBase

MIN_BYTES = 1 << 16
"""Smaller tensors cost more to move than they free."""
MAX_PENDING_BYTES = 1 << 30
"""Bytes on their way to the host at which the host waits, since they still occupy the device."""
_Packed = Tensor | Callable[[], Tensor]
"""A saved tensor, or a function that restores it."""


class ActivationOffload:
    """Offloads the saved tensors of the forward passes of one engine."""

    def __init__(self, inbound: CopyStream, outbound: CopyStream) -> None:
        self._inbound, self._outbound = inbound, outbound
        self._pending_bytes = 0
        self._seen: dict[tuple[int, int], tuple[StorageWeakRef, _HostStorage]] = {}
        self._last: _HostStorage | None = None

    @classmethod
    def of(cls, platform: PlatformBase) -> "ActivationOffload | None":
        """Return one for a platform; None if its device has no memory of its own."""
        inbound, outbound = platform.copy_stream(), platform.copy_stream()
        return cls(inbound, outbound) if inbound and outbound else None

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Scope of one forward pass."""
        try:
            with saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            # The graph alone keeps host memory from here on.
            self._seen.clear()
            self._last = None

    def pack(self, tensor: Tensor) -> _Packed:
        """Start to copy the storage of an activation, or of a DTensor's shard, to the host."""
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or tensor.nbytes < MIN_BYTES:
            return tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        view = _view_of(local, self._held(local))
        if not isinstance(tensor, DTensor):
            return view
        # Only these: the function must not keep the tensor itself alive.
        mesh, placements, shape, stride = (
            tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride(),
        )  # fmt: skip
        return lambda: DTensor.from_local(
            view(), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _held(self, tensor: Tensor) -> "_HostStorage":
        storage = tensor.untyped_storage()
        # The weak reference keeps the address of the storage from being used again.
        reference = StorageWeakRef(storage)
        key = reference.cdata, tensor._version
        if key not in self._seen:
            held = _HostStorage(storage, self._inbound, self._outbound, self._last)
            self._seen[key] = reference, held
            self._last = held
            self._pending_bytes += storage.nbytes()
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._outbound.synchronize()
            self._pending_bytes = 0
        held = self._seen[key][1]
        held.num_users += 1
        return held


class _HostStorage:
    """Bytes of one storage on the host; on the device from its first use to its last."""

    def __init__(
        self,
        storage: torch.UntypedStorage,
        inbound: CopyStream,
        outbound: CopyStream,
        before: "_HostStorage | None",
    ) -> None:
        self._inbound, self._outbound, self._before = inbound, outbound, before
        self._device = storage.device
        self.num_users = 0
        self._arrived: Tensor | None = None
        source = _bytes_of(storage)
        pinned = storage.device.type != "cpu"
        self._host = torch.empty_like(source, device="cpu", pin_memory=pinned)
        outbound.copy(source, self._host)

    def take(self) -> torch.UntypedStorage:
        """Return the storage on its device, for one user; start to bring the one before it."""
        arrived = self.bring()
        self._inbound.join()
        self.num_users -= 1
        if self.num_users == 0:
            self._arrived = None
        if self._before is not None and self._before.num_users > 0:
            self._before.bring()
        return arrived.untyped_storage()

    def bring(self) -> Tensor:
        """Start to copy to the device unless it is there."""
        if self._arrived is None:
            self._outbound.join()  # the copy to the host, which may still be under way
            self._arrived = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._inbound.copy(self._host, self._arrived)
        return self._arrived


def unpack(packed: _Packed) -> Tensor:
    """Restore a saved tensor on its device."""
    return packed if isinstance(packed, Tensor) else packed()


def _view_of(tensor: Tensor, held: _HostStorage) -> Callable[[], Tensor]:
    """Return a function that rebuilds a view; it does not keep the tensor."""
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    return lambda: torch.empty(0, **like).set_(held.take(), offset, size, stride)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as a (nbytes,) uint8 tensor that shares it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
