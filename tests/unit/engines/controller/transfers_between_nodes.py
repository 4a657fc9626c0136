"""Two nodes, each with a `/dev/shm` of its own, of two ranks and a replica beside each rank.

    unshare --user --map-root-user --net --pid --mount --fork --kill-child --mount-proc \\
        python transfers_between_nodes.py SERVING_DIRECTORY

Weights take one way after the other. Prints one line of JSON: for each way what the ranks sent,
what the replicas hold, and the bytes on the network, which only these processes have.
"""

import json
import multiprocessing
import os
import pickle  # our own test's files
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.collectives import connect_store, open_store
from engines.config.rollout import RolloutConfig, TransportName
from engines.config.training import LoraConfig
from engines.controller import rollout
from engines.controller.placement import Place
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import Sender, choose_transport
from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY

HOST = "127.0.0.1"
HANG_S = 120.0
NODES = ("one", "one", "two", "two")
"""Of each rank, and of the replica beside it."""
NODE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
NUM_TENSORS, TENSOR_BYTES = 8, 2**20
WAYS: Sequence[TransportName] = ("auto", "device_ipc", "collective")


def main() -> None:
    """The driver, on a node of its own."""
    serving_dir = Path(sys.argv[1])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rollout.this_address = lambda: HOST
    config = RolloutConfig(placement="colocated", timeout_s=HANG_S)
    spec = ReplicaSpec(
        serving_dir, config, "float32", "cpu", None, 1, serving_dir, adapter=LoraConfig(rank=2)
    )
    places = [Place(n, node, HOST, 1, {}) for n, node in enumerate(NODES)]
    chosen = {}
    for way in WAYS:
        asked = replace(spec, rollout=config.model_copy(update={"transport": way}))
        chosen[way] = choose_transport(asked, places, Sender(NODES, False))([1] * len(places))
    store = open_store(len(NODES), HANG_S, HOST)
    with tempfile.TemporaryDirectory() as directory:
        order = Path(directory, "order")
        order.write_bytes(pickle.dumps((store.port, chosen)))
        command = [*NODE, sys.executable, __file__, str(order)]
        nodes = [
            subprocess.Popen([*command, node], stdout=subprocess.PIPE, text=True)
            for node in dict.fromkeys(NODES)
        ]
        told = [json.loads(node.communicate(timeout=HANG_S)[0]) for node in nodes]
    for transport in chosen.values():
        transport.stop()
    found = {
        name: {
            "kind": type(transport).__name__,
            "sent": [each for node in told for each in node[name]["sent"]],
            "held": [each for node in told for each in node[name]["held"]],
            "devices": [node[name]["devices"] for node in told],
            "network_bytes": told[0][name]["network_bytes"],
        }
        for name, transport in chosen.items()
    }
    print(json.dumps({"own device": device_of(SHARED_MEMORY), "ways": found}))


def node(order: Path, name: str) -> None:
    """Ranks and replicas of one node, each a process."""
    port, chosen = pickle.loads(order.read_bytes())
    context = multiprocessing.get_context("fork")
    numbers = [number for number, node in enumerate(NODES) if node == name]
    # A replica that came early would be counted with the way before its own.
    begin = {way: context.Event() for way in chosen}
    ended = context.Queue()
    for number in numbers:
        context.Process(target=send, args=(port, number, chosen, begin, ended), daemon=True).start()
        for way in chosen:
            args = (way, chosen[way].sources[number], begin[way], ended)
            context.Process(target=receive, args=args, daemon=True).start()
    found = {way: {"sent": [], "held": [], "devices": [], "network_bytes": 0} for way in chosen}
    for _ in range(len(numbers) * 2 * len(chosen)):
        way, key, value, more = ended.get(timeout=HANG_S)
        found[way][key].append(value)
        if key == "held":
            found[way]["devices"] += more
        elif more:
            found[way]["network_bytes"] = more
    assert not list(SHARED_MEMORY.glob(f"{PREFIX}*"))
    print(json.dumps(found))


def send(port: int, rank: int, chosen, begin, ended) -> None:
    """A rank; rank 0 counts what all processes put on the network."""
    store, _ = connect_store(HOST, port)
    size, timeout = len(NODES), timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    for way, transport in chosen.items():
        dist.barrier()
        before = network_bytes()
        dist.barrier()
        begin[way].set()
        sent = transport.send(weights())
        dist.barrier()
        ended.put((way, "sent", sent.digest, network_bytes() - before if rank == 0 else 0))
    dist.barrier()
    dist.destroy_process_group()


def receive(way: str, source, begin, ended) -> None:
    begin.wait(HANG_S)
    checksums: Sequence[tuple[str, str]] = []
    devices: set[int] = set()
    for name, tensor in source.tensors():
        checksums.append((name, tensor_checksum(tensor, source.checksum_method)))
        devices.update(device_of(path) for path in SHARED_MEMORY.glob(f"{PREFIX}*"))
    ended.put((way, "held", combine(checksums), sorted(devices)))


def weights() -> Iterator[tuple[str, Tensor]]:
    """Every rank has a weight once all of them asked for it, as if they gathered it."""
    draw = torch.Generator().manual_seed(11)
    for number in range(NUM_TENSORS):
        dist.barrier()
        yield f"w{number}", torch.randn(TENSOR_BYTES // 4, generator=draw)


def network_bytes() -> int:
    """Bytes received so far on the loopback of this namespace."""
    (line,) = (each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each)
    return int(line.split()[1])


def device_of(path: Path) -> int:
    """Number of the file system that a path is on."""
    return path.stat().st_dev


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if len(sys.argv) == 2:
        main()
    else:
        node(Path(sys.argv[1]), sys.argv[2])
