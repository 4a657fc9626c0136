"""Buckets that readers open by handle; what both same-node transports do is in the test beside."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.checksum import TensorChecksums
from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import source_from_json, source_to_json
from engines.weight_sync import device_ipc
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.device_ipc import DeviceIpcSource, DeviceIpcTransport, open_transport
from hardware.cpu import CPUPlatform
from hardware.ipc_memory import HostIpcMemory

BUCKET_BYTES = 4096
HANG_S = 60.0


class CountedMemory(HostIpcMemory):
    """Of one process; lists the sizes that are allocated and opened, negative where they end."""

    def __init__(self, moves: list[int], refuses: Sequence[str] = ()) -> None:
        super().__init__()
        self._moves, self._refuses = moves, refuses

    def _move(self, what: str, num_bytes: int) -> None:
        if what in self._refuses:
            raise RuntimeError(f"no {what} on this device")
        self._moves.append(num_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        self._move("allocate", num_bytes)
        return super().allocate(num_bytes)

    def free(self, memory: Tensor) -> None:
        self._move("free", -len(memory))
        super().free(memory)

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        self._move("open", num_bytes)
        return super().open(handle, num_bytes)

    def close(self, memory: Tensor) -> None:
        self._move("close", -len(memory))
        super().close(memory)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    memory = CountedMemory(found)
    monkeypatch.setattr(CPUPlatform, "ipc_memory", lambda _: memory)
    return found


def transport(num_workers: Sequence[int] = (1,)) -> DeviceIpcTransport:
    names = frozenset({"kept"})
    return open_transport("cpu", "bfloat16", names, 600.0, "127.0.0.1", num_workers, BUCKET_BYTES)


def weights() -> list[tuple[str, Tensor]]:
    """The third and the last are larger than a bucket."""
    draw = torch.Generator().manual_seed(3)
    sizes = [900, 900, 5000, 3, 900, 2000, 900, 7000]
    return [(f"w{n}", torch.randn(size, generator=draw)) for n, size in enumerate(sizes)]


def held_by(source: DeviceIpcSource) -> WeightDigest:
    checksums = TensorChecksums(source.checksum_method)
    for name, tensor in source.tensors():
        checksums.add(name, tensor)
    return WeightDigest.of(checksums)


def read_in_thread(source: DeviceIpcSource) -> tuple[threading.Thread, list[WeightDigest]]:
    found: list[WeightDigest] = []
    thread = threading.Thread(target=lambda: found.append(held_by(source)))
    thread.start()
    return thread, found


def test_all_memory_is_closed_and_freed(moves: list[int]) -> None:
    sending = transport()
    reader, found = read_in_thread(sending.sources[0])
    sent = sending.send(iter(weights()))
    reader.join(HANG_S)
    assert found == [sent]
    assert sent.digest.startswith("matmul:")
    assert sorted(moves) == sorted(-each for each in moves)
    # Two buckets, and two tensors larger than a bucket, on two sides.
    assert sorted(each for each in moves if each > 0) == sorted(2 * [4096, 4096, 10_000, 14_000])
    sending.stop()


def test_large_tensors_do_not_add_up(moves: list[int]) -> None:
    sending = transport()
    reader, _ = read_in_thread(sending.sources[0])
    sending.send((f"w{n}", torch.ones(5000)) for n in range(6))
    reader.join(HANG_S)
    peak = max(sum(moves[:n]) for n in range(len(moves)))
    # The first bucket and two tensors, on two sides.
    assert peak <= 2 * (BUCKET_BYTES + 2 * 10_000)
    sending.stop()


def _read(source: DeviceIpcSource, results, refuses: Sequence[str]) -> None:
    CPUPlatform.ipc_memory = lambda _: CountedMemory([], refuses)
    results.put(held_by(source))


@pytest.mark.parametrize("who", ["the first reader", "the second reader", "the sender"])
def test_without_peer_access_it_goes_over_the_host(monkeypatch, caplog, who: str) -> None:
    sending = transport([2])
    of_reader = {"the first reader": 0, "the second reader": 1}.get(who)
    if of_reader is None:
        memory = CountedMemory([], ["allocate"])
        monkeypatch.setattr(CPUPlatform, "ipc_memory", lambda _: memory)
    (source,) = sending.sources
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    readers = [
        context.Process(
            target=_read,
            args=(source.of_worker(n), results, ["open"] if n == of_reader else []),
        )
        for n in range(2)
    ]
    for reader in readers:
        reader.start()
    device_ipc._warn.cache_clear()
    sent = sending.send(iter(weights()))
    assert [results.get(timeout=HANG_S) for _ in readers] == [sent] * 2
    for reader in readers:
        reader.join(HANG_S)
    sending.stop()
    reason = "no allocate" if of_reader is None else "no open"
    assert f"a device refuses: {reason} on this device" in caplog.text


def test_memory_of_a_failed_transfer_is_freed_by_the_next(moves: list[int]) -> None:
    """A reader that is busy with a bucket may still read it when the sender hears of a failure."""
    sending = transport([1, 1])
    first = sending.sources[0].tensors()

    def take(stream: Iterator[tuple[str, Tensor]]) -> None:
        with suppress(WeightSyncError):
            next(stream)

    hold = threading.Thread(target=take, args=(first,))
    # Its stream ends with the thread, before all was read.
    give_up = threading.Thread(target=lambda: take(sending.sources[1].tensors()))
    for thread in (give_up, hold):
        thread.start()
    with pytest.raises(ReceiverGoneError):
        sending.send((f"w{n}", torch.ones(900)) for n in range(1000))
    for thread in (give_up, hold):
        thread.join(HANG_S)
    assert sum(moves) > 0
    first.close()
    sending.stop()
    again = transport()
    reader, found = read_in_thread(again.sources[0])
    sent = again.send(iter(weights()))
    reader.join(HANG_S)
    assert found == [sent]
    assert sum(moves) == 0
    assert not device_ipc._left
    again.stop()


def test_a_device_without_room_is_named(monkeypatch) -> None:
    sizes: list[int] = []

    class Full(CountedMemory):
        def allocate(self, num_bytes: int) -> Tensor:
            if num_bytes > BUCKET_BYTES:
                raise RuntimeError("cudaMalloc: out of memory")
            return super().allocate(num_bytes)

    memory = Full(sizes)
    monkeypatch.setattr(CPUPlatform, "ipc_memory", lambda _: memory)
    sending = transport()
    reader = threading.Thread(
        target=pytest.raises, args=(WeightSyncError, held_by, sending.sources[0])
    )
    reader.start()
    with pytest.raises(WeightSyncError, match="out of memory; choose rollout.transport: shared"):
        sending.send(iter(weights()))
    reader.join(HANG_S)
    sending.stop()


def test_no_file_is_left_open() -> None:
    def files() -> int:
        links = (Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
        return sum("memfd" in os.readlink(each) for each in links if each.is_symlink())

    sending = transport()
    reader, _ = read_in_thread(sending.sources[0])
    sending.send(iter(weights()))
    reader.join(HANG_S)
    sending.stop()
    gc.collect()  # errors of other tests hold views of buckets
    assert not files()


def test_a_source_travels_as_json() -> None:
    sending = transport([1, 1])
    source = sending.sources[1]
    assert source_from_json(source_to_json(source)) == source
    sending.stop()
