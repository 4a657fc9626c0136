"""Process groups and the few collectives of the engines, guarded against gloo's traps.

Promises: a tensor that is not contiguous is refused (gloo's all-reduce and broadcast silently
corrupt it and its neighbours), and so is a dtype that not every backend carries; sums of counts
and metrics are taken in float64 and in rank order, so every rank gets the same bits. Every group
has a timeout, and an error says which group it was, which ranks are in it and what they did.
Not covered: collectives inside of torch, Megatron-Core and the like; their groups have the same
timeouts.
"""

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engines.errors import CollectiveError
from hardware.base import PlatformBase

CARRIED_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""Dtypes that gloo and NCCL both carry; anything else goes as a view of `torch.uint8`."""


def init_single_process_group(platform: PlatformBase, timeout_s: float) -> None:
    """A default process group of one process, without any socket."""
    dist.init_process_group(
        platform.process_group_backend,
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


def make_mesh(
    device_name: str, sizes: tuple[int, ...], names: tuple[str, ...], timeout_s: float
) -> DeviceMesh:
    """A mesh over all ranks whose groups are named and have a timeout.

    Args:
        device_name: torch device type.
        sizes: ranks in each dimension.
        names: of the dimensions; errors show them.
        timeout_s: of each collective; torch's own default is half an hour.

    Returns:
        The mesh.
    """
    mesh = init_device_mesh(device_name, sizes, mesh_dim_names=names)
    limit_waits(timeout_s)
    return mesh


def limit_waits(timeout_s: float) -> None:
    """Give every group of this process, whoever made it, a timeout for its next collectives.

    Of gloo and NCCL; other backends keep the timeouts that their groups were made with.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def describe(group: dist.ProcessGroup | None) -> str:
    """A group in words: its name, its ranks and which of them this process is."""
    found = group if group is not None else dist.group.WORLD
    if found is None:
        return "no group"
    ranks = dist.get_process_group_ranks(found)
    name = f"group {found.group_desc}" if found.group_desc != "default_pg" else "the group of all"
    own = f"; this is rank {dist.get_rank()}"
    return f"{name} ({dist.get_backend(found)}, ranks {', '.join(map(str, ranks))}{own})"


@contextmanager
def naming(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Scope of a collective.

    Args:
        what: the collective, and what it carries.
        group: None is the default group.

    Raises:
        CollectiveError: torch says that it failed or that its deadline passed.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CollectiveError(f"{what} failed in {describe(group)}: {reason}") from error


def _sendable(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"a collective got a non-contiguous tensor of shape {tuple(tensor.shape)}")
    if tensor.dtype not in CARRIED_DTYPES:
        raise ValueError(f"a collective got {tensor.dtype}; send tensor.view(torch.uint8)")
    return tensor


def _text(name: str, tensor: Tensor) -> str:
    return f"{name} of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce a contiguous tensor over the group, in place; without any group nothing is done.

    Args:
        tensor: of equal shape and dtype on every rank.
        group: None is the default group.
        op: sum, or maximum.

    Raises:
        ValueError: the tensor is not contiguous, or of a dtype that is not carried.
        CollectiveError: the collective failed.
    """
    if group is not None or dist.is_initialized():
        with naming(_text("all_reduce", tensor), group):
            dist.all_reduce(_sendable(tensor), op, group=group)


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy a contiguous tensor from the global rank `src` to all, in place.

    Args:
        tensor: of equal shape and dtype on every rank.
        src: global rank.
        group: None is the default group.

    Raises:
        ValueError: the tensor is not contiguous, or of a dtype that is not carried.
        CollectiveError: the collective failed.
    """
    if group is not None or dist.is_initialized():
        with naming(_text("broadcast", tensor), group):
            dist.broadcast(_sendable(tensor), src=src, group=group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every rank's tensor, in rank order, on every rank.

    Args:
        tensor: contiguous, of equal shape and dtype on every rank.
        group: None is the default group, which must exist.

    Returns:
        As many as the group has ranks.

    Raises:
        ValueError: the tensor is not contiguous, or of a dtype that is not carried.
        CollectiveError: the collective failed.
    """
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with naming(_text("all_gather", tensor), group):
        dist.all_gather(parts, _sendable(tensor), group=group)
    return parts


def all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block i of the first dimension to rank i.

    Args:
        tensor: contiguous; its first dimension is divisible by the group's size.
        group: all of it calls.

    Returns:
        The blocks that were received, in rank order, in the same shape.

    Raises:
        ValueError: the tensor is not contiguous, or of a dtype that is not carried.
        CollectiveError: the collective failed.
    """
    received = torch.empty_like(tensor)
    with naming(_text("all_to_all", tensor), group):
        dist.all_to_all_single(received, _sendable(tensor), group=group)
    return received


def gather_texts(text: str | None) -> list[str | None]:
    """Every rank's text, in rank order, on every rank of the default group; alone, one's own."""
    if not dist.is_initialized():
        return [text]
    texts: list[str | None] = [None] * dist.get_world_size()
    with naming("gathering of texts", None):
        dist.all_gather_object(texts, text)
    return texts


def raise_together(problem: OSError | None, what: str) -> None:
    """Let no rank go on, nor wait, where another could not write. Collective.

    Args:
        problem: of this rank, or None.
        what: could not be done, in words.

    Raises:
        OSError: a rank has a problem; every rank says whose.
    """
    if problem is not None and world_size() == 1:
        raise problem
    for number, text in enumerate(gather_texts(problem and str(problem))):
        if text is not None:
            raise OSError(f"{what}: rank {number}: {text}") from problem


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one.

    Raises:
        CollectiveError: a rank did not come in time.
    """
    if dist.is_initialized():
        with naming("barrier", None):
            dist.barrier()


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
        all_reduce(total, group)
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
    there = group is not None or dist.is_initialized()
    size = dist.get_world_size(group) if there else 1
    return [row.tolist()] if size == 1 else torch.stack(all_gather(row, group)).tolist()


def gather_ragged(
    values_N: Tensor, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Every rank's numbers, however many it has, in rank order, on every rank.

    Args:
        values_N: (N,) of any type; N may differ between ranks.
        device: where the collectives run.
        group: None is the default group.

    Returns:
        (sum of N,) float64, on the CPU.
    """
    counts = [int(count) for (count,) in gather_rows([values_N.numel()], device, group)]
    padded = torch.zeros(max(counts), dtype=torch.float64, device=device)
    padded[: values_N.numel()] = values_N.to(padded)
    rows = gather_rows(padded, device, group)
    return torch.tensor(
        [value for row, count in zip(rows, counts, strict=True) for value in row[:count]],
        dtype=torch.float64,
    )


def column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Sum over ranks of each number, in rank order."""
    return [sum(column) for column in zip(*rows, strict=True)]


def column_maxima(rows: Sequence[Sequence[float]]) -> list[float]:
    """Largest over ranks of each number; NaN when any is NaN."""
    return [
        math.nan if any(map(math.isnan, column)) else max(column)
        for column in zip(*rows, strict=True)
    ]
