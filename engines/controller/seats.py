"""Which rank of a group runs where: its rank on its node, and the address at which it is reached.

Promises: ranks of one node stand side by side; a group on one node talks over loopback alone, one
that spans nodes over the interface that Ray uses.
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
    """One rank's place among the others.

    Attributes:
        rank: in the group.
        world_size: ranks of the group.
        local_rank: among the ranks of its node.
        local_world_size: ranks of its node.
        node_rank: number of its node among those of the group.
        address: of its node, for the other ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str


def seats(places: Sequence[Place]) -> list[Seat]:
    """A seat for each rank.

    Args:
        places: of the ranks, those of one node side by side.

    Returns:
        In the same order.
    """
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
    """What libraries of training read of a rank's place.

    Args:
        seat: of the rank.
        sees_all_devices: whether the rank sees the devices of the whole node; else it has one.

    Returns:
        Variables of its process.
    """
    return {
        env.RANK.name: str(seat.rank),
        env.WORLD_SIZE.name: str(seat.world_size),
        # Libraries take it for the number of the device.
        env.LOCAL_RANK.name: str(seat.local_rank if sees_all_devices else 0),
        env.LOCAL_WORLD_SIZE.name: str(seat.local_world_size),
        env.GROUP_RANK.name: str(seat.node_rank),
    }


def use_interface_of(address: str) -> str:
    """Have this process's collectives use the interface that carries an address of this machine.

    Args:
        address: IPv4 or IPv6.

    Returns:
        The interface.

    Raises:
        OSError: no interface of this machine has it.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address and each.family in families for each in addresses):
            for variable in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME):
                if variable.get() is None:
                    env.set_for_process(variable.name, name)
            return name
    raise OSError(f"{address}: no interface of {socket.gethostname()} has this address")
