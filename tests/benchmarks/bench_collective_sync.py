"""Weights by broadcast to a rollout engine's process, against gloo's bare broadcast of the same.

A model of 0.5 GB in float32 goes from this process to another one of this machine. In turn: one
transfer through `engines.weight_sync.collective` (the rendezvous, packing, checksums on both sides,
and the copy into the receiver's parameters, until the receiver has said what it holds; the
communicator is kept, as in a run); `broadcast` of one parameter after the other into those of the
receiver, through a group that is there already, nothing checked; and the transfer through shared
memory.

Run: python tests/benchmarks/bench_collective_sync.py [--repeats N] [--threads N]
"""

import gc
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from measure import Measurement, arguments, ratio_line, take_turns, turn_by_turn
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.collectives import connect_store, open_store
from engines.weight_sync import shared_memory
from engines.weight_sync.base import Transport, WeightSource
from engines.weight_sync.collective import CollectiveTransport
from engines.weight_sync.communicator import BroadcastGroup

GOAL = 0.8
MIN_REPEATS = 7
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
SHAPES = [(32_768, 640), *[(640, 640), (1664, 640), (640, 1664), (640,), (640,)] * 37]


def make_weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(shape, generator=draw) for n, shape in enumerate(SHAPES)}


def receive(orders: Connection, port: int, num_threads: int) -> None:
    """What the other process does: read a source, or take part in a bare broadcast."""
    torch.set_num_threads(num_threads)
    own = {name: torch.empty_like(tensor) for name, tensor in make_weights().items()}
    store, address = connect_store(HOST, port)
    group = BroadcastGroup("gloo", store, 1, 2, address, TIMEOUT_S)
    while (source := orders.recv()) is not None:
        orders.send(take(source, own) if source else bare(group, own))


def take(source: WeightSource, own: dict[str, Tensor]) -> str:
    checksums = []
    for name, tensor in source.tensors():
        own[name].copy_(tensor)
        checksums.append((name, tensor_checksum(own[name])))
    return combine(checksums)


def bare(group: BroadcastGroup, weights: dict[str, Tensor]) -> str:
    for tensor in weights.values():
        group.broadcast(tensor)
    return ""


def transfers(
    open_transport: Callable[[], Transport], weights: dict[str, Tensor], orders: Connection
) -> Callable[[], float]:
    """A function that sends the weights once more and says how long it took."""

    def transfer() -> float:
        start = time.perf_counter()
        transport = open_transport()
        orders.send(transport.sources[0])
        sent = transport.send(iter(weights.items()))
        assert orders.recv() == sent.digest
        transport.stop()
        return time.perf_counter() - start

    return transfer


def broadcasts(
    group: BroadcastGroup, weights: dict[str, Tensor], orders: Connection
) -> Callable[[], float]:
    """A function that broadcasts the weights and says how long it took."""

    def broadcast() -> float:
        orders.send(())
        start = time.perf_counter()
        bare(group, weights)
        orders.recv()
        return time.perf_counter() - start

    return broadcast


def measure(repeats: int, num_threads: int) -> tuple[dict[str, Measurement], int]:
    """Seconds of each way, and the bytes that pass."""
    weights = make_weights()
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    store = open_store(2, TIMEOUT_S, HOST)
    context: Any = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    work = (theirs, store.port, num_threads)
    receiver = context.Process(target=receive, args=work, daemon=True)
    receiver.start()
    group = BroadcastGroup("gloo", store, 0, 2, HOST, TIMEOUT_S)
    of_transfers = open_store(2, TIMEOUT_S, HOST)

    def broadcast() -> Transport:
        return CollectiveTransport.open("float32", (), TIMEOUT_S, HOST, [1], server=of_transfers)

    def through_memory() -> Transport:
        return shared_memory.open_transport("float32", frozenset(), TIMEOUT_S, HOST, [1])

    taken = take_turns(
        {
            "collective": transfers(broadcast, weights, orders),
            "bare broadcast": broadcasts(group, weights, orders),
            "shared memory": transfers(through_memory, weights, orders),
        },
        repeats,
    )
    orders.send(None)
    receiver.join()
    return taken, num_bytes


def main() -> None:
    """Measure and print."""
    chosen = arguments(__doc__, peer=False)
    gc.freeze()  # as jobs do
    taken, num_bytes = measure(max(chosen.repeats, MIN_REPEATS), chosen.threads)
    for what, measured in taken.items():
        print(f"  {what}: {measured.text('s')}, {num_bytes / 1e9 / measured.median:.2f} GB/s")
    for what, goal in (("collective", GOAL), ("shared memory", None)):
        ratio = turn_by_turn(taken["bare broadcast"], taken[what])
        print(ratio_line(f"{what} against a bare broadcast", ratio, goal))


if __name__ == "__main__":
    main()
