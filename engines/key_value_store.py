"""Torch's key-value store, through which processes find each other before they have a group.

Promises: a server listens on one address alone, where torch by itself would open it on every
interface, and on a port that the operating system chose, so that two never meet on one; a client
of a server that is gone is told so within seconds.
Does not promise anything against those who reach that address: the store knows no passwords.
"""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

CONNECT_DEADLINE_S = 20.0


def open_store(num_clients: int, timeout_s: float, host: str) -> TCPStore:
    """A store of this process, listening on an address of this machine and a port that was free.

    Args:
        num_clients: processes that use it.
        timeout_s: how long one waits for another's key.
        host: the address, IPv4 or IPv6.

    Returns:
        The store; it lives as long as this object.

    Raises:
        OSError: the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        host, port, num_clients, is_master=True, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=listening.detach(),
    )  # fmt: skip


def connect_store(host: str, port: int) -> tuple[TCPStore, str]:
    """Another process's store, and the address at which this machine is seen from there.

    Args:
        host: of its server.
        port: as well.

    Returns:
        The store, and the address of the interface that leads to it.

    Raises:
        OSError: nobody listens there any more.
    """
    # The store itself would try again and again until its deadline.
    with socket.create_connection((host, port), CONNECT_DEADLINE_S) as probe:
        own_address = str(probe.getsockname()[0])
    timeout = timedelta(seconds=CONNECT_DEADLINE_S)
    return TCPStore(host, port, is_master=False, timeout=timeout), own_address
