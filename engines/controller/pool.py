"""What a run's processes need of the cluster, reserved at once: a Ray placement group.

Promises: all of it or nothing, so that runs which each need everything queue and never hold halves
of it; while it waits it says for what, and what the cluster has; what no cluster of these nodes
could ever give is refused soon; everything is given back by `close`, and when the process ends.
Does not promise whose turn is next: Ray decides among those that wait.
"""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.errors import DeadlineError

Options = Mapping[str, Any]
"""Keyword arguments of `ray.remote` that reserve something."""

SAY_EVERY_S = 60.0
NODE_ANSWERS_S = 3.0
POLL_S = 2.0
NODE_SHARE = 0.001
"""Of the resource that every Ray node has in its own name: enough to be placed there."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Queueing:
    """How a run waits until others' runs leave it room.

    Attributes:
        deadline_s: how long; they may take days.
        fit_deadline_s: how long for nodes to join without which it could never fit.
        say: told what is waited for, at once and now and then.
        waiting: called every few seconds meanwhile.
    """

    deadline_s: float = 604_800.0
    fit_deadline_s: float = 180.0
    say: Callable[[str], None] = logger.info
    waiting: Callable[[], None] = lambda: None


NO_NEWS = Queueing()


@dataclass(frozen=True)
class Place:
    """Where one process runs.

    Attributes:
        bundle: its number within the pool.
        node: id of the Ray node.
        address: of that node, as Ray knows it.
        port: of Ray's own process there.
        options: keyword arguments of an actor's `options` that start it there.
    """

    bundle: int
    node: str
    address: str
    port: int
    options: Options

    def node_answers(self) -> bool:
        """Whether Ray's process on the node takes a connection."""
        try:
            socket.create_connection((self.address, self.port), NODE_ANSWERS_S).close()
        except OSError:
            return False
        return True


class Pool:
    """Reserved resources; made by `reserve`.

    Args:
        group: Ray's placement group; reserved.
        places: one per bundle.
    """

    def __init__(self, group: Any, places: Sequence[Place]) -> None:
        self._group = group
        self._places = tuple(places)

    def places(self, first: int, num: int) -> tuple[Place, ...]:
        """Places of bundles that stand side by side, those on one node together.

        Args:
            first: number of the first bundle.
            num: how many.

        Returns:
            In the order in which their nodes have their first bundle.
        """
        chosen = self._places[first : first + num]
        nodes = list(dict.fromkeys(place.node for place in chosen))
        return tuple(sorted(chosen, key=lambda place: nodes.index(place.node)))

    def close(self) -> None:
        """Give everything back; what still runs there is killed. Harmless when repeated."""
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
    """Reserve one bundle for each place, all of them at once. Ray must be connected.

    Args:
        bundles: what each place needs, as keyword arguments of `ray.remote`.
        queueing: how to wait.
        on_this_node: number of the bundle that stands for this process itself.
        num_sharing: actors that will stand in each of the first places, on the same devices; one in
            those behind them.

    Returns:
        The pool; the caller closes it.

    Raises:
        DeadlineError: a deadline passed; says what was asked for and what the cluster has.
    """
    import ray

    wanted = [_resources(bundle) for bundle in bundles]
    if on_this_node is not None:
        wanted[on_this_node][f"node:{this_address()}"] = NODE_SHARE
    group = ray.util.placement_group(wanted, strategy="PACK")
    try:
        _wait(group, wanted, queueing)
        numbers = [*num_sharing, *[1] * (len(bundles) - len(num_sharing))]
        shares = [_share(*each) for each in zip(bundles, numbers, strict=True)]
        return Pool(group, _places(group, shares))
    except BaseException:
        ray.util.remove_placement_group(group)
        raise


def this_node() -> str:
    """Id of the Ray node that this process runs on. Ray must be connected."""
    import ray

    return ray.get_runtime_context().get_node_id()


def this_address() -> str:
    """Address of the Ray node that this process runs on. Ray must be connected."""
    import ray

    return str(ray.util.get_node_ip_address())


def _wait(group: Any, wanted: Sequence[Mapping[str, float]], queueing: Queueing) -> None:
    """Until the group is there; raises as `reserve`."""
    start = fitted_at = time.monotonic()
    said_at = start - SAY_EVERY_S
    while not group.wait(POLL_S):
        queueing.waiting()
        now, nodes = time.monotonic(), _node_totals()
        fits = _could_fit(wanted, nodes)
        fitted_at = now if fits else fitted_at
        what = f"room for {_told(wanted)} (the cluster has {_totals_told(nodes)})"
        if not fits and now - fitted_at >= queueing.fit_deadline_s:
            raise DeadlineError(f"{what}: more than its nodes have", queueing.fit_deadline_s)
        if now - start >= queueing.deadline_s:
            raise DeadlineError(what, queueing.deadline_s)
        if now - said_at >= SAY_EVERY_S:
            said_at = now
            queueing.say(f"waits for {what}, for {now - start:.0f} s so far")


def _share(options: Options, num_sharing: int) -> Options:
    """One actor's part of a place; Ray shows each of them the whole of a device they share."""
    if num_sharing == 1:
        return options
    parts = {name: v / num_sharing for name, v in options.items() if name != "resources"}
    named = {name: v / num_sharing for name, v in options.get("resources", {}).items()}
    return {**parts, "resources": named} if named else parts


def _resources(options: Options) -> dict[str, float]:
    """Ray's names of what those arguments reserve."""
    named = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0)}
    asked = {**named, **options.get("resources", {})}
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
                # Ray's default is a CPU beside whatever else an actor asks for.
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
    """Whether nodes that nobody uses would hold every bundle, the largest first."""
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


def _node_totals() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _told(wanted: Sequence[Mapping[str, float]]) -> str:
    kinds = Counter(
        " + ".join(f"{amount:g} {name}" for name, amount in bundle.items() if "node:" not in name)
        for bundle in wanted
    )
    return ", ".join(f"{num} x {kind}" for kind, num in kinds.items())


def _totals_told(totals: Sequence[Mapping[str, float]]) -> str:
    """What each node has that processes ask for."""
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
    nodes = Counter(
        " + ".join(f"{v:g} {n}" for n, v in sorted(node.items()) if not n.startswith(hidden))
        for node in totals
    )
    return ", ".join(f"{num} x ({kind or 'nothing'})" for kind, num in nodes.items())
