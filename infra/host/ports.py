"""Pick loopback ports for servers that bind them only seconds later; check servers over HTTP.

Until a server listens, its port looks free, so two homes could pick the same one and clients would
talk to the wrong server. So a picked port is also claimed by a Linux abstract socket, which belongs
to the network namespace as ports do and vanishes with its process.
Promises: while a process lives, no other process that asks this module picks one of its ports. A
forked child does not prolong the claims of its parent.
Does not promise: anything about other programs, systems other than Linux, or sandboxes without
abstract sockets.
"""

import errno
import http.client
import json
import os
import random
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

TIMEOUT_S = 3.0
NO_ANSWER = (OSError, http.client.HTTPException)
"""Errors of `exchange` with a server that does not answer in HTTP."""
_FIRST_PORT = 20_000  # Ray's workers use 10,002 to 19,999
_NUM_PORT_TRIES = 100
# Not seeded: processes must choose differently, and no result depends on the choice.
_dice = random.SystemRandom()

_claims: dict[int, socket.socket] = {}


def pick_ports(count: int) -> list[int]:
    """Return `count` different free TCP ports, and claim them for this process.

    If possible they are below the ephemeral range, so the system does not assign them meanwhile.
    """
    return [_any_port() for _ in range(count)]


def pick_port(preferred: int) -> int:
    """Claim and return the preferred port if it is free and others do not claim it, else any."""
    return preferred if _take(preferred) else _any_port()


def _any_port() -> int:
    end = _first_ephemeral_port()
    for _ in range(_NUM_PORT_TRIES if end > _FIRST_PORT else 0):
        port = _dice.randrange(_FIRST_PORT, end)
        if port not in _claims and _take(port):
            return port
    while True:  # ends at the latest when no port is left, which raises
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
            if port not in _claims and _claim(port):
                return port


def _take(port: int) -> bool:
    is_new = port not in _claims
    if is_new and not _claim(port):
        return False
    # Check after the claim: a previous claimer may have just ended and left its server listening.
    with suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores those in TIME_WAIT
        probe.bind(("127.0.0.1", port))
        return True
    if is_new:
        _claims.pop(port).close()
    return False


def _claim(port: int) -> bool:
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
    """Drop the claims in a forked child, which would otherwise keep them after its parent ended."""
    for name in _claims.values():
        name.close()
    _claims.clear()


os.register_at_fork(after_in_child=_forget)


def _first_ephemeral_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    except FileNotFoundError:
        return 49_152
    return int(text.split()[0])


def answers_ok(url: str) -> bool:
    """Return True if a GET of a plain HTTP address gives status 200."""
    return _content("GET", url) is not None


def online_workers(api_url: str, pool: str) -> int:
    """Return the number of online workers of a Prefect work pool; 0 if the server is silent."""
    answer = _content("POST", f"{api_url}/work_pools/{pool}/workers/filter", {})
    return sum(worker.get("status") == "ONLINE" for worker in json.loads(answer or b"[]"))


def _content(method: str, url: str, body: Any = None) -> bytes | None:
    """Return the content of a 200 answer; None for anything else, silence included."""
    try:
        status, content = exchange(method, url, body)
    except NO_ANSWER:
        return None
    return content if status == 200 else None


def exchange(
    method: str,
    url: str,
    body: Any = None,
    token: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """Send a request, without proxies; return status and content, or raise one of `NO_ANSWER`.

    `body` is sent as JSON, `token` in a header. `timeout_s` limits the connection and each read.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with closing(connect(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)) as to:
        target = urlunsplit(("", "", parts.path, parts.query, ""))
        to.request(method, target, None if body is None else json.dumps(body), headers)
        response = to.getresponse()
        return response.status, response.read()
