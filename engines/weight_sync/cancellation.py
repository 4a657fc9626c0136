"""Cancels a transfer whose processes are on other nodes than its owner, and may have other torches.

The owner listens on a socket and accepts nothing; each process of the transfer keeps a connection
to it. The kernel resets the connections when the owner closes the socket or dies.
Does not promise that the loss of the owner's node is noticed.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from engines.errors import WeightSyncError

CONNECT_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Cancellation:
    """Address of the owner's socket; plain data outside its process, where `server` is None."""

    host: str
    port: int
    server: socket.socket | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}

    @classmethod
    def open(cls, host: str) -> "Cancellation":
        """Listen at a local address; raise OSError if `host` is not one of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        return cls(host, server.getsockname()[1], server)

    def cancel(self) -> None:
        """Cancel the transfer; does nothing in other processes, and may be called again."""
        if self.server is not None:
            with suppress(OSError):  # closed before
                # Ends it also for forked processes, which hold the same socket.
                self.server.shutdown(socket.SHUT_RDWR)
            self.server.close()

    @contextmanager
    def watch(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns True once the transfer is cancelled.

        Raises:
            WeightSyncError: the owner cannot be reached.
        """
        with ExitStack() as connected:
            try:
                connection = connected.enter_context(
                    socket.create_connection((self.host, self.port), CONNECT_DEADLINE_S)
                )
            except (ConnectionRefusedError, ConnectionResetError):
                yield lambda: True
                return
            except OSError as error:
                raise WeightSyncError(
                    f"the owner of the weight transfer, {self.host}:{self.port}: {error}"
                ) from error
            connection.setblocking(False)
            yield lambda: _is_reset(connection)


def _is_reset(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
