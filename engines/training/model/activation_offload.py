"""Keeps saved activations in host memory instead of on the device; weights stay there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

_MIN_BYTES = 1 << 16
"""Smaller tensors cost more to move than they free."""


@dataclass(frozen=True)
class _OnHost:
    """A tensor's values on the host, and the function that restores the tensor."""

    values: Tensor
    restore: Callable[[Tensor], Tensor]


_Packed = Tensor | _OnHost


def activations_on_host(device: torch.device) -> AbstractContextManager[None]:
    """Scope of a forward pass with saved activations in (pinned) host memory; no-op on a CPU."""
    if device.type == "cpu":
        return nullcontext()
    return cast(AbstractContextManager[None], saved_tensors_hooks(to_host, from_host))


def to_host(tensor: Tensor) -> _Packed:
    """Copy a large activation, or a DTensor's shard, to the host; pinned with an accelerator."""
    if _is_weight(tensor) or tensor.nbytes < _MIN_BYTES:
        return tensor
    restore: Callable[[Tensor], Tensor] = _same
    if isinstance(tensor, DTensor):
        tensor, restore = tensor.to_local(), _place_again(tensor)
    home = tensor.device
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=home.type != "cpu")
    host.copy_(tensor)
    return _OnHost(host, lambda values: restore(values.to(home, non_blocking=True)))


def from_host(packed: _Packed) -> Tensor:
    """Restore the tensor that was given to `to_host`, on its device."""
    return packed if isinstance(packed, Tensor) else packed.restore(packed.values)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _place_again(tensor: DTensor) -> Callable[[Tensor], Tensor]:
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()

    def place(local: Tensor) -> Tensor:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return place


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
