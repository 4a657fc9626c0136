"""Reserves the resources of a run's processes, all in one Ray placement group; places ranks there.

Promises: all or nothing, so that competing runs queue instead of each holding a part; a waiting run
reports what it waits for and what the cluster has; a request that exceeds the nodes is refused
soon; `close` or the end of the process releases everything. Ranks of one node are consecutive. If
the environment names no interface, ranks use Ray's, or loopback if the pool is on one node.
Does not promise an order: Ray decides which waiting run is next.
"""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from infra import env
from infra.errors import DeadlineError, on_failure

Options = Mapping[str, Any]
"""Keyword arguments of `ray.remote` that reserve resources."""

SAY_EVERY_S = 60.0
NODE_ANSWERS_S = 3.0
POLL_S = 2.0
NODE_SHARE = 0.001
"""Share of a node's own Ray resource (`node:<address>`): enough to pin a bundle to the node."""

LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Queueing:
    """Deadlines and callbacks of a run that waits for free resources.

    Attributes:
        deadline_s: total wait; other runs may take days.
        fit_deadline_s: wait for nodes to join if the request does not fit the present ones.
        say: called with a status line about every `SAY_EVERY_S`; `waiting` every `POLL_S`.
    """

    deadline_s: float = 604_800.0
    fit_deadline_s: float = 180.0
    say: Callable[[str], None] = logger.info
    waiting: Callable[[], None] = lambda: None


NO_NEWS = Queueing()


@dataclass(frozen=True)
class Place:
    """Where one process runs: bundle, Ray node, address of its raylet, and actor options."""

    bundle: int
    node: str
    address: str
    port: int
    options: Options

    def node_answers(self) -> bool:
        """True if the raylet of the node accepts a connection."""
        with suppress(OSError):
            socket.create_connection((self.address, self.port), NODE_ANSWERS_S).close()
            return True
        return False


class Pool:
    """Reserved resources, one place per bundle of the placement group; made by `reserve`."""

    def __init__(self, group: Any, places: Sequence[Place]) -> None:
        self._group = group
        self._places = tuple(places)

    def places(self, first: int, num: int) -> tuple[Place, ...]:
        """Return the places of `num` bundles from `first` on, grouped by node."""
        chosen = self._places[first : first + num]
        nodes = list(dict.fromkeys(place.node for place in chosen))
        return tuple(sorted(chosen, key=lambda place: nodes.index(place.node)))

    @property
    def is_on_one_node(self) -> bool:
        """True if all places, also those of replicas, are on one node."""
        return len({place.node for place in self._places}) == 1

    @contextmanager
    def closed_on_error(self) -> Iterator["Pool"]:
        """Yield the pool, and close it if the block raises."""
        with on_failure(lambda _: self.close()):
            yield self

    def close(self) -> None:
        """Release everything and kill what still runs there; may be called again."""
        group, self._group = self._group, None
        if group is not None:
            import ray

            if ray.is_initialized():
                ray.util.remove_placement_group(group)


def reserve(
    bundles: Sequence[Options],
    queueing: Queueing = NO_NEWS,
    on_this_node: int | None = None,
    num_sharing: Sequence[int] = (),
) -> Pool:
    """Reserve one bundle per place, all at once, or raise a DeadlineError. Ray must be connected.

    Args:
        bundles: what each place needs, as keyword arguments of `ray.remote`.
        on_this_node: index of the bundle that must be on this process's node; None: no bundle.
        num_sharing: number of actors on the devices of each of the first places; 1 for the others.
    """
    import ray

    wanted = [_resources(bundle) for bundle in bundles]
    if on_this_node is not None:
        wanted[on_this_node][f"node:{this_address()}"] = NODE_SHARE
    group = ray.util.placement_group(wanted, strategy="PACK")
    with Pool(group, ()).closed_on_error():
        _wait(group, wanted, queueing)
        numbers = [*num_sharing, *[1] * (len(bundles) - len(num_sharing))]
        return Pool(
            group, _places(group, [_share(*each) for each in zip(bundles, numbers, strict=True)])
        )


def this_node() -> str:
    """Return the Ray node id of this process. Ray must be connected."""
    import ray

    return ray.get_runtime_context().get_node_id()


def this_address() -> str:
    """Return the address of this process's Ray node. Ray must be connected."""
    import ray

    return str(ray.util.get_node_ip_address())


def _wait(group: Any, wanted: Sequence[Mapping[str, float]], queueing: Queueing) -> None:
    """Wait until the group is reserved."""
    import ray

    start = fitted_at = time.monotonic()
    said_at = start - SAY_EVERY_S
    while not group.wait(POLL_S):
        queueing.waiting()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        now = time.monotonic()
        asked, there = (Counter(map(_listed, each)).items() for each in (wanted, nodes))
        what = (
            f"room for {', '.join(f'{num} x {text}' for text, num in asked)} "
            f"(the cluster has {', '.join(f'{num} x ({text})' for text, num in there)})"
        )
        if _could_fit(wanted, nodes):
            fitted_at = now
        elif now - fitted_at >= queueing.fit_deadline_s:
            raise DeadlineError(f"{what}: more than its nodes have", queueing.fit_deadline_s)
        if now - start >= queueing.deadline_s:
            raise DeadlineError(what, queueing.deadline_s)
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            queueing.say(f"waits for {what}, for {now - start:.0f} s so far")


def _share(options: Options, num_sharing: int) -> Options:
    """Return one actor's fraction of a place; Ray shows it the whole of a shared device."""
    if num_sharing == 1:
        return options
    parts = {name: v / num_sharing for name, v in options.items() if name != "resources"}
    named = {name: v / num_sharing for name, v in options.get("resources", {}).items()}
    return {**parts, "resources": named} if named else parts


def _resources(options: Options) -> dict[str, float]:
    """Return Ray's resource amounts by name, from keyword arguments of `ray.remote`."""
    asked = {
        "CPU": options.get("num_cpus", 0),
        "GPU": options.get("num_gpus", 0),
        **options.get("resources", {}),
    }
    return {name: float(amount) for name, amount in asked.items() if amount}


def _places(group: Any, bundles: Sequence[Options]) -> list[Place]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    alive = {node["NodeID"]: node for node in ray.nodes()}
    return [
        Place(
            number,
            nodes[number],
            alive[nodes[number]]["NodeManagerAddress"],
            alive[nodes[number]]["NodeManagerPort"],
            {
                # Ray's default is one CPU in addition to what an actor asks for.
                "num_cpus": 0,
                **options,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            },
        )
        for number, options in enumerate(bundles)
    ]


def _could_fit(wanted: Sequence[Mapping[str, float]], nodes: Sequence[dict[str, float]]) -> bool:
    """True if idle nodes would hold every bundle, by first fit with the largest first."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(wanted, key=lambda each: sum(each.values()), reverse=True):
        for node in free:
            if all(node.get(name, 0.0) >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    node[name] -= amount
                break
        else:
            return False
    return True


def _listed(amounts: Mapping[str, float]) -> str:
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
    shown = (f"{v:g} {n}" for n, v in sorted(amounts.items()) if not n.startswith(hidden))
    return " + ".join(shown) or "nothing"


def rank_addresses(pool: Pool, num_ranks: int) -> list[str]:
    """Return the address that each of the first places uses for collectives, as rank.

    That of its node; loopback only if the pool has no other node, since ranks and replicas join the
    same communicators.
    """
    return [
        LOOPBACK if pool.is_on_one_node else place.address for place in pool.places(0, num_ranks)
    ]


def rank_environments(places: Sequence[Place], *, sees_all_devices: bool) -> list[dict[str, str]]:
    """Return the environment variables of each rank; places of one node must be consecutive.

    LOCAL_RANK is 0 if a rank sees only its device.
    """
    held = [place.node for place in places]
    nodes = list(dict.fromkeys(held))
    return [
        {
            env.RANK.name: str(rank),
            env.WORLD_SIZE.name: str(len(held)),
            # Libraries use it as the device index.
            env.LOCAL_RANK.name: str(held[:rank].count(node) if sees_all_devices else 0),
            env.LOCAL_WORLD_SIZE.name: str(held.count(node)),
            env.GROUP_RANK.name: str(nodes.index(node)),
        }
        for rank, node in enumerate(held)
    ]


def use_interface_of(address: str) -> str:
    """Have collectives use the interface with a local address, unless the environment names one.

    Return the interface of gloo, and that of NCCL if it is another.

    Raises:
        OSError: no interface has the address.
    """
    used = {each.name: each.get() for each in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME)}
    for variable in [name for name, interface in used.items() if interface is None]:
        used[variable] = _interface_of(address)
        env.set_for_process(variable, used[variable])
    return ", NCCL over ".join(dict.fromkeys(map(str, used.values())))


def _interface_of(address: str) -> str:
    families = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address and each.family in families for each in addresses):
            return name
    raise OSError(f"{address}: no interface of {socket.gethostname()} has this address")
