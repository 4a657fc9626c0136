"""The rank of each process on its node and the address at which it is reached.

Promises: ranks of one node are consecutive; a group on one node uses only loopback, a group over
several nodes uses Ray's interface.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from engines.controller.pool import Place
from infra import env

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """One rank's place among the others; `address` is that of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str


def seats(places: Sequence[Place]) -> list[Seat]:
    """Return a seat for each place; places of one node must be consecutive."""
    nodes = list(dict.fromkeys(place.node for place in places))
    held = [place.node for place in places]
    return [
        Seat(
            rank=rank,
            world_size=len(places),
            local_rank=held[:rank].count(place.node),
            local_world_size=held.count(place.node),
            node_rank=nodes.index(place.node),
            address=LOOPBACK if len(nodes) == 1 else place.address,
        )
        for rank, place in enumerate(places)
    ]


def seat_environment(seat: Seat, *, sees_all_devices: bool) -> dict[str, str]:
    """Return a rank's environment variables; LOCAL_RANK is 0 if it sees only its device."""
    return {
        env.RANK.name: str(seat.rank),
        env.WORLD_SIZE.name: str(seat.world_size),
        # Libraries use it as the device index.
        env.LOCAL_RANK.name: str(seat.local_rank if sees_all_devices else 0),
        env.LOCAL_WORLD_SIZE.name: str(seat.local_world_size),
        env.GROUP_RANK.name: str(seat.node_rank),
    }


def use_interface_of(address: str) -> str:
    """Restrict collectives to the interface with a local address and return its name."""
    families = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address and each.family in families for each in addresses):
            for variable in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME):
                if variable.get() is None:
                    env.set_for_process(variable.name, name)
            return name
    raise OSError(f"{address}: no interface of {socket.gethostname()} has this address")
