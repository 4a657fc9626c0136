"""TCP ports of the loopback interface for servers that take seconds to bind them.

Until a server listens its port looks free, and two starters of two homes would take the same one:
the server of one then ends, and his clients talk to the other's. So who picks a port also takes its
name among Linux's abstract sockets. They belong to the network namespace as ports do, whoever the
user and whatever the container, and go with their process.
Promises: what a living process picked here no other one picks, a child that it forks included.
Does not promise: anything about programs that do not ask here; or about ours outside Linux, or
where a sandbox allows no such names.
"""

import errno
import os
import random
import socket
import sys
from pathlib import Path

_FIRST_PORT = 20_000
"""Ray's workers take 10,002 to 19,999."""
_NUM_PORT_TRIES = 100
# Another process must not make the same choices; nothing that a run computes depends on them.
_dice = random.SystemRandom()

_claims: dict[int, socket.socket] = {}
"""The names of the ports that this process picked."""


def pick_ports(count: int) -> list[int]:
    """TCP ports that are free now, all different.

    They lie below those that the operating system hands out by itself, if it leaves room there:
    a server may take seconds to bind its port, and until then nobody shall get it by chance.

    Args:
        count: how many.

    Returns:
        The ports.
    """
    return [_any_port() for _ in range(count)]


def pick_port(preferred: int) -> int:
    """A port of one's choice.

    Args:
        preferred: the port.

    Returns:
        It, where it is free now and no other process picked it; else another one.
    """
    return preferred if _take(preferred) else _any_port()


def _any_port() -> int:
    end = _first_ephemeral_port()
    for _ in range(_NUM_PORT_TRIES if end > _FIRST_PORT else 0):
        port = _dice.randrange(_FIRST_PORT, end)
        if port not in _claims and _take(port):
            return port
    while True:  # ends at the latest when every port is taken, which is an error
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
            if port not in _claims and _claim(port):
                return port


def _take(port: int) -> bool:
    """Whether the port is free, and nobody else's: this process has its name from now on."""
    is_new = port not in _claims
    if is_new and not _claim(port):
        return False
    # Now, and not before: whoever had the name may have ended since, with his server listening.
    if _is_free(port):
        return True
    if is_new:
        _claims.pop(port).close()
    return False


def _is_free(port: int) -> bool:
    """Whether a server could listen there; what a server left that just ended does not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """Whether this process, which has it not yet, gets the port's name."""
    name = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            name.bind(f"\0rlhf/port/{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            name.close()
            return False
    _claims[port] = name
    return True


def _forget() -> None:
    """A forked child has nothing: else it would keep the names when its parent is gone."""
    for name in _claims.values():
        name.close()
    _claims.clear()


os.register_at_fork(after_in_child=_forget)


def _first_ephemeral_port() -> int:
    """The first port that the operating system hands out by itself; IANA's outside Linux."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    except FileNotFoundError:
        return 49_152
    return int(text.split()[0])
