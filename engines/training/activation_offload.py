"""Keep what the backward pass needs in host memory instead of on the device.

Promises: gradients are bit for bit those without it. Weights stay where they are: a sharded
backend frees and gathers them itself.
"""

from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_MIN_BYTES = 1 << 16
"""Smaller tensors cost more to move than they free."""

_Packed = Tensor | tuple[torch.device, Tensor]


def activations_on_host(device: torch.device) -> AbstractContextManager[None]:
    """Scope of a forward pass whose saved activations live in (pinned) host memory.

    Args:
        device: of the model; on a CPU everything stays where it is.

    Returns:
        The scope.
    """
    pin = device.type != "cpu"

    def pack(tensor: Tensor) -> _Packed:
        if not pin or _is_weight(tensor) or tensor.nbytes < _MIN_BYTES:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor)
        return tensor.device, host

    def unpack(packed: _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        home, host = packed
        return host.to(home, non_blocking=True)

    return cast(AbstractContextManager[None], saved_tensors_hooks(pack, unpack))


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
