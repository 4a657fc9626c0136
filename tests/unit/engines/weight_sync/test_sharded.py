"""Weights that each rank sends in parts, between real processes and through gloo."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.collectives import open_store
from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import source_from_json, source_to_json
from engines.weight_places import WeightPlace, WeightShard
from engines.weight_sync import communicator
from engines.weight_sync.base import WeightDigest
from engines.weight_sync.sharded import ShardedTransport
from infra.errors import DeadlineError

HOST, NUM_RANKS, BUCKET_BYTES, NUM_SMALL = "127.0.0.1", 2, 6144, 60
HANG_S = 120.0
"""Until what is waited for must have come; the transfer itself would wait far longer."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["engines.weight_sync.sharded"])


def whole_weights() -> dict[str, Tensor]:
    """Cut by rows, by columns, not at all; one is larger than a bucket."""
    draw = torch.Generator().manual_seed(5)
    sizes = {"rows": (7, 3), "large": (4000, 2), "columns": (6, 64), "scalar": (), "odd": (31, 31)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def shards(rank: int, damage: str = "") -> Iterator[WeightShard]:
    """What one of two ranks holds; `scalar` is held by both, and rank 0 speaks for it.

    Reading `columns` is collective, as it is where an adapter is merged.
    """
    weights = whole_weights()
    if damage == "small":
        weights = {f"w{number}": torch.ones(40, 9) for number in range(NUM_SMALL)}
    if damage == "tail":
        weights = {"rows": weights["rows"], "tail": weights["odd"]}
    for name, tensor in weights.items():
        if name == "tail":
            dist.barrier()
            place = WeightPlace(name, tuple(tensor.shape), (0, 0), tuple(tensor.shape))
            yield WeightShard(place, tensor, rank == 1)
            continue
        if tensor.ndim == 0:
            copy = tensor + 1 if damage == "copy" and rank else tensor
            yield WeightShard(WeightPlace(name, (), (), ()), copy, rank == 0)
            continue
        dimension = 1 if name == "columns" else 0
        if name == "columns":
            dist.barrier()
        cut = tensor.shape[dimension] // 3
        bounds = (0, cut) if rank == 0 else (cut, tensor.shape[dimension])
        values = tensor.narrow(dimension, bounds[0], bounds[1] - bounds[0])
        offsets = tuple(bounds[0] if d == dimension else 0 for d in range(tensor.ndim))
        place = WeightPlace(name, tuple(tensor.shape), offsets, tuple(values.shape))
        yield WeightShard(place, values, is_owner=True)
        if damage == "killed" and rank == 1 and name == "large":
            os.kill(os.getpid(), signal.SIGKILL)


def send(transport: ShardedTransport, results, rank: int, place: Path, damage: str) -> None:
    store = dist.FileStore(str(place), NUM_RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    if damage == "bit" and rank == 1:
        spoil_what_is_sent()
    try:
        plan = transport.plan(shards(rank, damage if damage in ("small", "tail") else ""))
        sent = [transport.send_parts(shards(rank, damage), plan)]
    except (WeightSyncError, DeadlineError) as error:
        sent = [f"{type(error).__name__}: {error}"]
    results.put(("rank", rank, sent[0]))


def spoil_what_is_sent() -> None:
    broadcast = communicator.BroadcastGroup.broadcast

    def flip(self, memory: Tensor, root: int) -> None:
        memory[3] ^= root == 1
        broadcast(self, memory, root)

    communicator.BroadcastGroup.broadcast = flip


def read(source, results, pause_s: float = 0.0) -> None:
    source, found = source_from_json(source_to_json(source)), {}
    try:
        for name, tensor in source.tensors():
            time.sleep(pause_s)
            assert name not in found
            found[name] = (tensor_checksum(tensor), str(tensor.dtype))
    except (WeightSyncError, DeadlineError) as error:
        found = f"{type(error).__name__}: {error}"
    results.put(("reader", source.reader, found))


def measure(source, results) -> None:
    """Bytes of all tensors of this process whenever a weight is handed out."""
    held = []
    gc.freeze()  # what was imported holds no weights, and takes long to look through
    for _ in source.tensors():
        gc.collect()
        found = [thing for thing in gc.get_objects() if type(thing) is Tensor]
        storages = {(s := t.untyped_storage()).data_ptr(): s.nbytes() for t in found}
        held.append(sum(storages.values()))
        del found  # or it would keep them
    results.put(("reader", source.reader, held))


def kill_oneself(source, results) -> None:
    next(source.tensors())
    os.kill(os.getpid(), signal.SIGKILL)


def count_communicators() -> tuple[list[object], list[int]]:
    """Communicators that this process makes from here, and the sizes of their broadcasts."""
    made: list[object] = []
    num_bytes: list[int] = []
    make, broadcast = communicator.BroadcastGroup.__init__, communicator.BroadcastGroup.broadcast

    def counted(self, *arguments) -> None:
        made.append(self)
        make(self, *arguments)

    def measured(self, memory: Tensor, root: int = 0) -> None:
        num_bytes.append(memory.numel())
        broadcast(self, memory, root)

    communicator.BroadcastGroup.__init__ = counted
    communicator.BroadcastGroup.broadcast = measured
    return made, num_bytes


def send_each(transports, results, rank: int, place: Path) -> None:
    made, num_bytes = count_communicators()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(place), NUM_RANKS), rank=rank, world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    plan = transports[0].plan(shards(rank))
    for each in transports:
        sent = each.send_parts(shards(rank), plan)
        results.put(("rank", rank, (sent.digest, len(made), sum(num_bytes))))


def read_each(sources, results) -> None:
    made, num_bytes = count_communicators()
    for each in sources:
        digest = combine((name, tensor_checksum(tensor)) for name, tensor in each.tensors())
        results.put(("reader", each.reader, (digest, len(made), sum(num_bytes))))


@pytest.mark.parametrize("delta_sync", [False, True])
def test_all_ranks_and_readers_share_one_communicator(tmp_path: Path, delta_sync: bool) -> None:
    """Also in the next transfer, in which delta sync sends no unchanged part."""
    server = open_store(4, 600.0, HOST)
    transports = [
        ShardedTransport.open(
            "bfloat16", {"rows"}, 600.0, HOST, [1, 1], num_senders=NUM_RANKS,
            bucket_bytes=BUCKET_BYTES, server=server, delta_sync=delta_sync,
        )
        for _ in range(2)
    ]  # fmt: skip
    results = PROCESSES.Queue()
    stripped = [replace(each, server=None) for each in transports]
    jobs: list[tuple[Callable, tuple]] = [
        (read_each, ([each.sources[reader] for each in stripped], results)) for reader in range(2)
    ]
    jobs += [(send_each, (stripped, results, r, tmp_path / "store")) for r in range(NUM_RANKS)]
    processes = [PROCESSES.Process(target=work, args=given, daemon=True) for work, given in jobs]
    for process in processes:
        process.start()
    found = [results.get(timeout=HANG_S) for _ in range(2 * len(jobs))]
    for process in processes:
        process.join(timeout=HANG_S)
        assert process.exitcode == 0
    assert len({digest for _, _, (digest, _, _) in found}) == 1
    assert {num_made for _, _, (_, num_made, _) in found} == {1}
    whole, both = sorted({num_bytes for _, _, (_, _, num_bytes) in found})
    assert both < whole * 1.02 if delta_sync else both == 2 * whole


@pytest.fixture
def transfer(tmp_path: Path):
    started = []

    def run(
        damage: str = "",
        readers: tuple[Callable, ...] = (read, read),
        expected: int = 4,
        timeout_s: float = 600.0,
    ):
        transport = ShardedTransport.open(
            "bfloat16", {"rows"}, timeout_s, HOST, [1] * len(readers), num_senders=NUM_RANKS,
            bucket_bytes=BUCKET_BYTES,
        )  # fmt: skip
        results = PROCESSES.Queue()
        jobs = [
            (reader, (s, results)) for reader, s in zip(readers, transport.sources, strict=True)
        ]
        stripped = replace(transport, server=None)
        jobs += [
            (send, (stripped, results, r, tmp_path / "store", damage)) for r in range(NUM_RANKS)
        ]
        for target, arguments in jobs:
            process = PROCESSES.Process(target=target, args=arguments, daemon=True)
            process.start()
            started.append(process)
        ends = [results.get(timeout=HANG_S) for _ in range(expected)]
        return {(kind, n): what for kind, n, what in ends}

    yield run
    for process in started:
        process.kill()
        process.join()


def test_readers_put_together_what_no_rank_had_whole(transfer) -> None:
    found = transfer()
    served = {
        name: tensor if name == "rows" else tensor.bfloat16()
        for name, tensor in whole_weights().items()
    }
    expected = {name: (tensor_checksum(t), str(t.dtype)) for name, t in served.items()}
    assert found["reader", 0] == found["reader", 1] == expected
    digest = combine((name, checksum) for name, (checksum, _) in expected.items())
    num_bytes = sum(tensor.nbytes for tensor in served.values())
    assert found["rank", 0] == found["rank", 1] == WeightDigest(digest, len(served), num_bytes)


def test_rank_done_with_its_parts_keeps_reading_with_the_others(transfer) -> None:
    found = transfer("tail")
    assert found["reader", 0] == found["reader", 1]
    assert found["reader", 0].keys() == {"rows", "tail"}
    assert found["rank", 0] == found["rank", 1]


def test_a_bit_that_changes_on_its_way_is_found_by_part(transfer) -> None:
    found = transfer("bit")
    for reader in range(2):
        assert "what rank 1 sent is not what arrived" in found["reader", reader]
    assert all("is not what arrived" in found["rank", rank] for rank in range(2))


def test_copies_that_differ_between_ranks_are_found(transfer) -> None:
    found = transfer("copy")
    for rank in range(2):
        assert found["rank", rank].startswith("WeightSyncError: scalar at [] of []: ranks 0 and 1")


def test_a_reader_that_is_killed_ends_every_rank(transfer) -> None:
    found = transfer(readers=(read, kill_oneself), expected=3)
    assert found["reader", 0].startswith("WeightSyncError: ")
    assert all(found["rank", rank].startswith("ReceiverGoneError: ") for rank in range(2))


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_readers(transfer) -> None:
    found = transfer("killed", expected=2, timeout_s=20.0)
    assert {kind for kind, _ in found} == {"reader"}
    assert all("is gone" in what or "gave up" in what for what in found.values())


def test_a_receiver_holds_two_buckets(transfer) -> None:
    """Of weights that fit: the parts that are read, those that come, and what is put together."""
    found = transfer("small", readers=(measure,), expected=3)
    held = found["reader", 0]
    assert len(held) == NUM_SMALL
    assert BUCKET_BYTES // 2 < max(held) <= 2 * BUCKET_BYTES
