"""Ports that are free, and of one starter alone."""

import errno
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.host import ports as ports_module
from infra.host.ports import pick_port, pick_ports

PICKS = "from infra.host.ports import pick_port; print(pick_port({}), flush=True); input()"
FORKS = """
import os
from infra.host.ports import pick_port
assert pick_port({0}) == {0}
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(pick_port({0}) == {0})
"""


def test_ports_are_different_free_and_prefer_the_usual_one() -> None:
    ports = pick_ports(20)
    assert len(set(ports)) == 20
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert not [port for port in ports if int(handed_out[0]) <= port <= int(handed_out[1])]
    assert pick_port(ports[0]) == ports[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[1]))
        taken.listen()
        assert pick_port(ports[1]) != ports[1]


def test_ports_are_found_where_the_system_hands_out_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports_module, "_first_ephemeral_port", lambda: 1024)
    assert len(set(pick_ports(5))) == 5


def test_port_picked_by_a_live_process_is_reserved_before_listen() -> None:
    [port] = pick_ports(1)
    ports_module._claims.pop(port).close()
    argv = [sys.executable, "-c", PICKS.format(port)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert int(other.stdout.readline()) == port
        assert pick_port(port) != port, "two starters, and neither listens yet"
        other.stdin.close()
        assert other.wait(60) in {0, 1}
    assert pick_port(port) == port
    assert pick_port(port) == port, "who picked it may start his server again"


def test_a_forked_child_has_nothing_of_what_its_parent_picked() -> None:
    [port] = pick_ports(1)
    ports_module._claims.pop(port).close()
    subprocess.run([sys.executable, "-c", FORKS.format(port)], check=True, timeout=120)


def test_server_listening_as_its_starter_ends_keeps_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The starter's name is free again between a look at the port and a look at the name."""
    [port] = pick_ports(1)
    ports_module._claims.pop(port).close()
    claim, server = ports_module._claim, socket.socket()

    def claim_late(picked: int) -> bool:
        if picked == port:
            server.bind(("127.0.0.1", port))
            server.listen()
        return claim(picked)

    monkeypatch.setattr(ports_module, "_claim", claim_late)
    with server:
        assert pick_port(port) != port
        assert port not in ports_module._claims


def test_ports_are_found_where_such_names_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Denied(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_UNIX:
                raise PermissionError(errno.EACCES, "denied")
            super().bind(address)

    monkeypatch.setattr(ports_module.socket, "socket", Denied)
    assert len(set(pick_ports(3))) == 3
