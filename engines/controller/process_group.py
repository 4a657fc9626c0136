"""Joins the ranks of a worker group into a torch.distributed process group.

The operating system chooses the store's port on the machine of rank 0, so two groups that start
together cannot collide.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Rendezvous:
    """Host and port of rank 0's store."""

    host: str
    port: int


def join(
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    *,
    store: TCPStore | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Make this process a rank of the default process group.

    Rank 0 passes its `store`, other ranks the `rendezvous`. `timeout_s` is the deadline of the
    rendezvous and of each collective.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        if rendezvous is None:
            raise ValueError("a rank needs the store of rank 0, or where to find it")
        store = TCPStore(
            rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=timeout
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
