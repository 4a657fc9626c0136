"""Weights by handles of device memory, between real processes, and checksums on the device."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines import matmul_checksum
from engines.checksum import TensorChecksums, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync import device_ipc
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.device_ipc import DeviceIpcTransport, open_transport
from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY, SharedMemorySource
from hardware.base import PlatformBase
from hardware.detection import create
from infra.errors import DeadlineError

BUCKET_BYTES = 4 * 2**20
HANG_S = 120.0
"""A process takes seconds to import torch and open a device."""
KILLED_DEADLINE_S = 15.0
"""Longer than a process takes to open a device."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn)


def weights(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Of uneven sizes; two are larger than a bucket."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 3), (3000, 1000), (), (0, 4), (640, 160), (5,), (3_000_000,), (310, 310)]
    for number, size in enumerate(sizes):
        yield f"layer.{number}", torch.randn(size, generator=draw).to(device)
    yield "steps", torch.arange(9, device=device)


def endless(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for number in range(100_000):
        yield f"w{number}", torch.ones(1_000_000, device=device)


def receive(source: SharedMemorySource, results) -> None:
    checksums = TensorChecksums(source.checksum_method)
    devices = set()
    for name, tensor in source.tensors():
        checksums.add(name, tensor.clone())
        devices.add(tensor.device.type)
    results.put((source.reader, WeightDigest.of(checksums), devices))


def be_killed(source: SharedMemorySource, results) -> None:
    stream = source.tensors()
    next(stream)
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(source: SharedMemorySource, results) -> None:
    next(source.tensors())


def report(source: SharedMemorySource, results) -> None:
    try:
        list(source.tensors())
    except WeightSyncError as error:
        results.put(str(error))


@pytest.fixture
def device(platform: PlatformBase) -> torch.device:
    platform.set_device(0) if platform.device_name != "cpu" else None
    return platform.device()


@pytest.fixture
def transport(platform: PlatformBase) -> Iterator[Callable[[Sequence[int]], DeviceIpcTransport]]:
    opened: list[DeviceIpcTransport] = []

    def make(num_workers: Sequence[int]) -> DeviceIpcTransport:
        names = frozenset({"layer.1"})
        name = platform.vendor_name
        opened.append(
            open_transport(name, "bfloat16", names, HANG_S, "127.0.0.1", num_workers, BUCKET_BYTES)
        )
        return opened[-1]

    yield make
    for each in opened:
        each.stop()
        assert not list(SHARED_MEMORY.glob(f"{PREFIX}*-{each.token}.*"))


def start(sources: Sequence[SharedMemorySource], work: Callable = receive):
    """Spawned, since a process that was forked cannot use CUDA."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    readers = [context.Process(target=begin, args=(work, source, results)) for source in sources]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert results.get(timeout=HANG_S) == "begins"
    return readers, results


def begin(work: Callable, source: SharedMemorySource, results) -> None:
    results.put("begins")
    work(source, results)


def free_bytes(platform: PlatformBase) -> int:
    platform.empty_cache()
    platform.synchronize()
    return 0 if platform.device_name == "cpu" else torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("num_workers", [[1], [2], [1, 2]])
def test_each_worker_holds_what_was_sent(platform, device, transport, num_workers) -> None:
    sending = transport(num_workers)
    every = [
        source.of_worker(worker)
        for source, num in zip(sending.sources, num_workers, strict=True)
        for worker in range(num)
    ]
    readers, results = start(every)
    before = free_bytes(platform)
    sent = sending.send(weights(device))
    found = sorted((results.get(timeout=HANG_S) for _ in readers), key=lambda each: each[0])
    for reader in readers:
        reader.join(HANG_S)
    assert found == [(n, sent, {platform.device_name}) for n in range(len(every))]
    host = TensorChecksums("matmul")
    for name, tensor in weights(torch.device("cpu")):
        is_cast = tensor.is_floating_point() and name != "layer.1"
        host.add(name, tensor.to(torch.bfloat16) if is_cast else tensor)
    assert sent == WeightDigest.of(host)
    # Readers have ended; blocks of 2 MiB that torch's allocator holds are left.
    assert free_bytes(platform) >= before - 4 * 2**20
    assert not device_ipc._left


def test_a_killed_receiver_is_a_deadline(device, transport) -> None:
    sending = transport([1])
    (reader,), _ = start(sending.sources, be_killed)
    with pytest.raises(DeadlineError, match="rollout engine 0 to read on"):
        replace(sending, timeout_s=KILLED_DEADLINE_S).send(endless(device))
    reader.join(HANG_S)
    assert reader.exitcode == -signal.SIGKILL


def test_a_receiver_that_gives_up_ends_the_sender(platform, device, transport) -> None:
    sending = transport([1, 1])
    readers, _queue = start(sending.sources[:1])
    others, _other_queue = start(sending.sources[1:], give_up)
    with pytest.raises(ReceiverGoneError):
        sending.send(endless(device))
    for reader in (*readers, *others):
        reader.join(HANG_S)
    assert device_ipc._left
    again = transport([1])
    _, results = start(again.sources)
    sent = again.send(weights(device))
    assert results.get(timeout=HANG_S) == (0, sent, {platform.device_name})
    assert not device_ipc._left


def test_a_sender_that_fails_ends_its_receiver(device, transport) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(900, device=device)
        raise ZeroDivisionError

    sending = transport([1])
    _, results = start(sending.sources, report)
    with pytest.raises(ZeroDivisionError):
        sending.send(broken())
    assert results.get(timeout=HANG_S) == "the trainer gave up while it sent weights"


def test_two_processes_share_one_allocation(platform, device) -> None:
    """Each reads what the other wrote."""
    ipc = create(platform.vendor_name).ipc_memory()
    memory = ipc.allocate(1000)
    memory.copy_(torch.arange(1000, device=device).to(torch.uint8))
    platform.synchronize()
    readers, results = start([(ipc.handle(memory), platform.vendor_name)], open_and_add)  # pyright: ignore[reportArgumentType]
    assert results.get(timeout=HANG_S) == int(torch.arange(1000).to(torch.uint8).sum())
    readers[0].join(HANG_S)
    assert memory[0].item() == 77
    ipc.free(memory)


def open_and_add(given: tuple[bytes, str], results) -> None:
    handle, name = given
    platform = create(name)
    if platform.device_name != "cpu":
        platform.set_device(0)
    ipc = platform.ipc_memory()
    memory = ipc.open(handle, 1000)
    total = int(memory.long().sum())
    memory[0] = 77
    platform.synchronize()
    ipc.close(memory)
    results.put(total)


def test_a_refused_handle_names_the_cause(platform) -> None:
    ipc = create(platform.vendor_name).ipc_memory()
    with pytest.raises(RuntimeError, match="shared memory|IpcOpenMemHandle"):
        ipc.open(b"\0" * 64, 1000)
    # A refusal must not come up again in torch's next call.
    assert torch.ones(3, device=platform.device()).sum().item() == 3


def test_the_checksum_of_a_device_is_the_hosts(platform, device) -> None:
    assert matmul_checksum._is_exact(device), "else it is computed in float32, several times slower"
    draw = torch.Generator().manual_seed(4)
    stored = torch.randint(0, 2, (3_000_008,), generator=draw, dtype=torch.uint8)
    stored[::3] *= 127
    for dtype in DTYPES:
        values = stored % 2 if dtype is torch.bool else stored
        whole = values.view(dtype)
        for tensor in (whole, whole[:7], whole[1:200_001], whole[:3000].view(50, 60).t()):
            expected = tensor_checksum(tensor, "matmul")
            on_device = whole.to(device)
            moved = on_device.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            assert tensor_checksum(moved, "matmul") == expected, (dtype, tensor.shape)


def test_the_checksum_reads_before_later_work(device) -> None:
    """The memory of a bucket is overwritten behind it, on the same stream."""
    bucket = torch.zeros(4_000_000, device=device)
    checksums, whole = TensorChecksums("matmul"), {}
    for number in range(5):
        bucket.fill_(number)
        checksums.add(str(number), bucket)
        whole[str(number)] = tensor_checksum(torch.full((4_000_000,), float(number)), "matmul")
    assert checksums.by_name() == whole
