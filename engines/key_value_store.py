"""Torch's key-value store, through which processes find each other before they form a group.

Promises: a server listens on one address only (torch by default opens it on every interface) and on
a free port chosen by the operating system; connecting to a dead server fails within seconds.
Does not promise security: the store has no passwords.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

CONNECT_DEADLINE_S = 20.0


def open_store(num_clients: int, timeout_s: float, host: str) -> TCPStore:
    """Open a store of this process on a local IPv4 or IPv6 address and a free port.

    `timeout_s` is how long a process waits for a key. Raise OSError if `host` is not local.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
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
    timeout = timedelta(seconds=CONNECT_DEADLINE_S)
    return TCPStore(host, port, is_master=False, timeout=timeout), own_address
