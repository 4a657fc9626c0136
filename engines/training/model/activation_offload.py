"""Keep what the backward pass needs in host memory instead of on the device.

Promises: gradients are bit for bit those without it. Weights stay where they are: a sharded
backend frees and gathers them itself.
"""

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
    """A tensor's values, and what makes it of them again."""

    values: Tensor
    restore: Callable[[Tensor], Tensor]


_Packed = Tensor | _OnHost


def activations_on_host(device: torch.device) -> AbstractContextManager[None]:
    """Scope of a forward pass whose saved activations live in (pinned) host memory.

    Args:
        device: of the model; on a CPU everything stays where it is.

    Returns:
        The scope.
    """
    if device.type == "cpu":
        return nullcontext()
    return cast(AbstractContextManager[None], saved_tensors_hooks(to_host, from_host))


def to_host(tensor: Tensor) -> _Packed:
    """Copy what is worth it to the host, into pinned memory where there is an accelerator.

    Of a tensor that is cut over ranks, the part of this rank.
    """
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
    """The tensor that `to_host` was given, in value, place and device."""
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
