"""Process groups and the few collectives of the engines, guarded against gloo's traps.

Promises: a tensor that is not contiguous is refused (gloo's all-reduce and broadcast silently
corrupt it and its neighbours); sums of counts and metrics are taken in float64 and in rank
order, so every rank gets the same bits. Every group has a timeout.
"""

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from hardware.base import PlatformBase


def init_single_process_group(platform: PlatformBase, timeout_s: float) -> None:
    """A default process group of one process, without any socket."""
    dist.init_process_group(
        platform.communication_backend,
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=timeout_s),
    )


def close_process_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Processes of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def require_contiguous(tensor: Tensor) -> Tensor:
    """Refuse what gloo would silently corrupt.

    Args:
        tensor: about to enter a collective.

    Returns:
        The tensor itself.

    Raises:
        ValueError: it is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a collective got a non-contiguous tensor of shape {tuple(tensor.shape)}")
    return tensor


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a contiguous tensor over the group, in place."""
    if dist.is_initialized():
        dist.all_reduce(require_contiguous(tensor), group=group)


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy a contiguous tensor from the global rank `src` to all, in place."""
    if dist.is_initialized():
        dist.broadcast(require_contiguous(tensor), src=src, group=group)


def broadcast_json(
    value: Any, src: int, group: dist.ProcessGroup, device: torch.device
) -> Any:  # fmt: skip
    """What one rank holds, on every rank of the group.

    Args:
        value: anything JSON can hold, floats bit for bit; only that of `src` is looked at.
        src: rank within the group.
        group: all of it calls.
        device: where the collective runs.

    Returns:
        The value as JSON reads it back (a tuple becomes a list).
    """
    text = json.dumps(value).encode() if dist.get_rank(group) == src else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    global_src = dist.get_global_rank(group, src)
    broadcast(size, src=global_src, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if text:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    broadcast(data, src=global_src, group=group)
    return json.loads(bytes(data.cpu().tolist()))


class SumOverRanks(torch.autograd.Function):
    """Sum over a group whose ranks go on to compute the same loss from the result.

    Each rank's gradient is that of the common loss; the rank's own share of the sum takes it as
    it is, and the parameters' gradients are then summed over the ranks elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`x` summed over the group."""
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """The gradient, unchanged."""
        return grad_outputs[0], None


def gather_rows(
    values: Sequence[float] | Tensor, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Every rank's numbers, in rank order, on every rank.

    Args:
        values: as many on every rank; whole numbers are exact up to 2**53.
        device: where the collective runs.
        group: None is the default group.

    Returns:
        One list per rank.
    """
    row = torch.as_tensor(values, dtype=torch.float64, device=device)
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size == 1:
        return [row.tolist()]
    rows = torch.empty((size, row.numel()), dtype=torch.float64, device=device)
    dist.all_gather(list(rows.unbind()), require_contiguous(row), group=group)
    return rows.tolist()


def column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Sum over ranks of each number, in rank order."""
    return [sum(column) for column in zip(*rows, strict=True)]


def column_maxima(rows: Sequence[Sequence[float]]) -> list[float]:
    """Largest over ranks of each number; NaN when any is NaN."""
    return [
        math.nan if any(map(math.isnan, column)) else max(column)
        for column in zip(*rows, strict=True)
    ]
