"""Process groups and the few collectives of the engines, guarded against pitfalls of gloo.

`group=None` is the default group. `device` is where a collective runs. Tensors have the same shape
and dtype on every rank. Processes find each other through torch's key-value store.
Promises: a tensor that is not contiguous is refused with a ValueError (gloo's all-reduce and
broadcast silently corrupt it and its neighbours), and so is a dtype outside `CARRIED_DTYPES`;
counts and metrics are summed in float64 and in rank order, so every rank gets the same
bits. Every group has a timeout; a failure is a `CollectiveError` that names the group, its ranks
and the collective. A store listens on one address only (torch by default opens it on every
interface) and on a free port chosen by the operating system; connecting to a dead store fails
within `CONNECT_DEADLINE_S`.
Does not promise security (the store has no passwords), or anything about collectives inside torch,
Megatron-Core and similar libraries, except that their groups have the same timeouts.
"""

import errno
import json
import math
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from engines.errors import CollectiveError
from hardware.base import PlatformBase

CONNECT_DEADLINE_S = 20.0
CARRIED_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""Dtypes that gloo and NCCL both support; others must be sent as a view of `torch.uint8`."""


def init_single_process_group(platform: PlatformBase, timeout_s: float) -> None:
    """Create a default process group of one process without any socket."""
    dist.init_process_group(
        platform.process_group_backend,
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=timeout_s),
    )


def close_process_group() -> None:
    """Destroy the default process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Return the size of the default group, or 1 if there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank in the default group, or 0 if there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def make_mesh(
    device_name: str, sizes: tuple[int, ...], names: tuple[str, ...], timeout_s: float
) -> DeviceMesh:
    """Return a device mesh over all ranks with named groups and a timeout per collective."""
    mesh = init_device_mesh(device_name, sizes, mesh_dim_names=names)
    limit_waits(timeout_s)
    return mesh


def limit_waits(timeout_s: float) -> None:
    """Set a timeout for the next collectives of all gloo and NCCL groups of this process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def _guarded(
    what: str, group: dist.ProcessGroup | None = None, tensor: Tensor | None = None
) -> Iterator[None]:
    """Refuse tensors that gloo corrupts; a torch `RuntimeError` becomes a `CollectiveError`."""
    if tensor is not None:
        if not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise ValueError(f"a collective got a non-contiguous tensor of shape {shape}")
        if tensor.dtype not in CARRIED_DTYPES:
            raise ValueError(f"a collective got {tensor.dtype}; send tensor.view(torch.uint8)")
        what = f"{what} of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    try:
        yield
    except RuntimeError as error:
        name = group.group_desc if group is not None else "default_pg"
        name = f"group {name}" if name != "default_pg" else "the group of all"
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        where = f"({dist.get_backend(group)}, ranks {ranks}; this is rank {dist.get_rank()})"
        reason = str(error).splitlines()[0]
        raise CollectiveError(f"{what} failed in {name} {where}: {reason}") from error


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce a contiguous tensor over the group in place; a no-op if there is no group."""
    if group is not None or dist.is_initialized():
        with _guarded("all_reduce", group, tensor):
            dist.all_reduce(tensor, op, group=group)


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copy a contiguous tensor from the global rank `src` to all ranks in place."""
    if group is not None or dist.is_initialized():
        with _guarded("broadcast", group, tensor):
            dist.broadcast(tensor, src=src, group=group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the contiguous tensors of all ranks in rank order, on every rank."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with _guarded("all_gather", group, tensor):
        dist.all_gather(parts, tensor, group=group)
    return parts


def all_to_all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send block i of the first dimension to rank i; return the received blocks in rank order."""
    received = torch.empty_like(tensor)
    with _guarded("all_to_all", group, tensor):
        dist.all_to_all_single(received, tensor, group=group)
    return received


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor without gradient; a collective all-gather if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def gather_texts(text: str | None) -> list[str | None]:
    """Return the texts of all ranks of the default group in rank order, on every rank."""
    if not dist.is_initialized():
        return [text]
    texts: list[str | None] = [None] * dist.get_world_size()
    with _guarded("gathering of texts"):
        dist.all_gather_object(texts, text)
    return texts


def gather_values(value: Any) -> list[Any]:
    """Return the JSON values of all ranks of the default group in rank order, on every rank."""
    return [json.loads(text or "null") for text in gather_texts(json.dumps(value))]


def raise_together(problem: Exception | None, what: str) -> None:
    """Raise OSError on all ranks if one has a `problem`; a lone rank raises that. Collective."""
    if problem is not None and world_size() == 1:
        raise problem
    code = getattr(problem, "errno", None) or errno.EIO
    own = problem and json.dumps([code, f"{problem}" or type(problem).__name__])
    for number, text in enumerate(gather_texts(own)):
        if text is not None:
            code, said = json.loads(text)
            raise OSError(code, f"{what}: rank {number}: {said}") from problem


def barrier() -> None:
    """Wait for all ranks of the default group, if there is one."""
    if dist.is_initialized():
        with _guarded("barrier"):
            dist.barrier()


def broadcast_json(
    value: Any, src: int, group: dist.ProcessGroup, device: torch.device
) -> Any:  # fmt: skip
    """Return the JSON value of the group's rank `src` on every rank; a tuple becomes a list."""
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
    """Sum over a group whose ranks all compute the same loss from the result.

    The backward pass returns the gradient unchanged: every rank has the gradient of the common
    loss, and the gradients of the parameters are summed over ranks elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `x` summed over the group."""
        total = x.contiguous().clone()
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return grad_outputs[0], None


def gather_rows(
    values: Sequence[float] | Tensor, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Return the `values` of every rank, in rank order, as floats; integers are exact to 2**53."""
    row = torch.as_tensor(values, dtype=torch.float64, device=device)
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else 1
    return [row.tolist()] if size == 1 else torch.stack(all_gather(row, group)).tolist()


def gather_ragged(
    values_N: Tensor, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Concatenate (N,) tensors of all ranks, whose N may differ, to float64 on the CPU."""
    counts = [int(count) for (count,) in gather_rows([values_N.numel()], device, group)]
    padded = torch.zeros(max(counts), dtype=torch.float64, device=device)
    padded[: values_N.numel()] = values_N.to(padded)
    return torch.tensor(
        [
            value
            for row, count in zip(gather_rows(padded, device, group), counts, strict=True)
            for value in row[:count]
        ],
        dtype=torch.float64,
    )


def column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of each column, added in rank order."""
    return [sum(column) for column in zip(*rows, strict=True)]


def column_maxima(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the maximum of each column over ranks; NaN if any value is NaN."""
    return [
        math.nan if any(map(math.isnan, column)) else max(column)
        for column in zip(*rows, strict=True)
    ]


def open_store(num_clients: int, timeout_s: float, host: str) -> TCPStore:
    """Serve a key-value store from this process at a local IPv4 or IPv6 address, on a free port.

    `timeout_s` is how long a process waits for a key. Raise OSError if `host` is not local.
    """
    listening = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )
    port = listening.getsockname()[1]
    return TCPStore(
        host, port, num_clients, is_master=True, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=listening.detach(),
    )  # fmt: skip


def connect_store(host: str, port: int) -> tuple[TCPStore, str]:
    """Connect to a store; return it and the local address of the interface that leads to it."""
    # TCPStore itself would retry until its deadline.
    with socket.create_connection((host, port), CONNECT_DEADLINE_S) as probe:
        own_address = str(probe.getsockname()[0])
    return TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=CONNECT_DEADLINE_S)
    ), own_address
