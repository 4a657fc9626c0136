"""Where ranks stand among each other, and the address that they use."""

import os
import socket

import pytest

from engines.collectives import open_store
from engines.controller.placement import (
    Place,
    Pool,
    rank_addresses,
    rank_environments,
    use_interface_of,
)


def place(bundle: int, node: str) -> Place:
    return Place(bundle, node, f"10.0.0.{node}", 1, {})


def test_ranks_of_one_node_stand_side_by_side() -> None:
    pool = Pool(None, [place(i, node) for i, node in enumerate("2121133")])
    places = pool.places(0, 5)
    assert [p.bundle for p in places] == [0, 2, 1, 3, 4]
    found = rank_environments(places, sees_all_devices=True)
    assert [variables["RANK"] for variables in found] == ["0", "1", "2", "3", "4"]
    assert [variables["GROUP_RANK"] for variables in found] == ["0", "0", "1", "1", "1"]
    assert [variables["LOCAL_RANK"] for variables in found] == ["0", "1", "0", "1", "2"]
    assert [variables["LOCAL_WORLD_SIZE"] for variables in found] == ["2", "2", "3", "3", "3"]
    assert rank_addresses(pool, 3) == ["10.0.0.2", "10.0.0.2", "10.0.0.1"]
    assert [p.bundle for p in pool.places(5, 2)] == [5, 6]


@pytest.mark.parametrize(("replica_node", "address"), [("1", "127.0.0.1"), ("2", "10.0.0.1")])
def test_ranks_use_loopback_if_all_is_on_one_node(replica_node: str, address: str) -> None:
    """A replica elsewhere joins communicators that a rank roots."""
    pool = Pool(None, [place(0, "1"), place(1, "1"), place(2, replica_node)])
    assert rank_addresses(pool, 2) == [address, address]


def test_a_rank_that_sees_one_device_takes_the_first() -> None:
    places = [place(0, "1"), place(1, "1")]
    (_, one) = rank_environments(places, sees_all_devices=False)
    (_, every) = rank_environments(places, sees_all_devices=True)
    assert (one["LOCAL_RANK"], every["LOCAL_RANK"]) == ("0", "1")
    assert (one["RANK"], one["LOCAL_WORLD_SIZE"], one["GROUP_RANK"]) == ("1", "2", "0")


@pytest.mark.parametrize(
    ("named", "said", "gloo", "nccl"),
    [
        ({}, "lo", "lo", "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "eth9, NCCL over lo", "eth9", "lo"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "lo, NCCL over ^docker", "lo", "^docker"),
        ({"GLOO_SOCKET_IFNAME": "e", "NCCL_SOCKET_IFNAME": "e"}, "e", "e", "e"),
    ],
)
def test_collectives_use_the_interface_of_the_address(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], said: str, gloo: str, nccl: str
) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set first, so that the end of the test restores what the code sets.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    for variable, interface in named.items():
        monkeypatch.setenv(variable, interface)
    assert use_interface_of("127.0.0.1") == said
    assert os.environ["GLOO_SOCKET_IFNAME"] == gloo
    assert os.environ["NCCL_SOCKET_IFNAME"] == nccl


def test_an_address_of_no_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(OSError, match=r"203\.0\.113\.9: no interface of"):
        use_interface_of("203.0.113.9")


def test_a_store_answers_on_its_address_alone() -> None:
    store = open_store(1, 5.0, "127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port), timeout=60.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=60.0)
