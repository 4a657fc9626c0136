"""Joining the ranks of one worker group into a torch.distributed process group.

The store's port is taken by the operating system on the machine of rank 0 and told to the
others, so two groups that start together never meet on one port.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet.

    Attributes:
        host: address of rank 0's store.
        port: its port.
    """

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

    Args:
        rank: of this process.
        world_size: number of ranks.
        backend: `gloo`, `nccl` or what the platform names.
        timeout_s: deadline of the meeting and of each collective.
        store: rank 0's own store; the other ranks leave it out.
        rendezvous: where the other ranks find that store.

    Raises:
        ValueError: neither a store nor a rendezvous was given.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        if rendezvous is None:
            raise ValueError("a rank needs the store of rank 0, or where to find it")
        store = TCPStore(
            rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=timeout
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
