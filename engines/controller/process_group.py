"""Joining the ranks of one worker group into a torch.distributed process group.

The store's port is taken by the operating system on the machine of rank 0 and told to the
others, so two groups that start together never meet on one port. Loopback only.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"


def open_store(world_size: int, timeout_s: float) -> TCPStore:
    """Rank 0's store, listening on a port of the operating system's choice."""
    return TCPStore(
        LOOPBACK, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )  # fmt: skip


def join(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    port: int,
    store: TCPStore | None,
) -> None:
    """Make this process a rank of the default process group.

    Args:
        rank: of this process.
        world_size: number of ranks.
        backend: `gloo`, `nccl` or what the platform names.
        timeout_s: deadline of the meeting and of each collective.
        port: of rank 0's store.
        store: on rank 0 the store itself; None on the others, which connect to it.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(LOOPBACK, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
