"""Weights through memory of one node, between real processes: the host's, or a device's."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines.checksum import combine, tensor_checksum
from engines.errors import WeightSyncError
from engines.weight_sync import buckets, device_ipc, shared_memory
from engines.weight_sync.base import ReceiverGoneError
from engines.weight_sync.shared_memory import (
    PREFIX,
    SHARED_MEMORY,
    SharedMemorySource,
    SharedMemoryTransport,
)
from infra import env
from infra.errors import DeadlineError
from infra.waiting import wait_for

BUCKET_BYTES = 4096
HOST = "127.0.0.1"
NODE = Path(__file__).with_name("transfer_on_node.py")
HANG_S = 60.0
"""Guard against hanging; a deadline that a test must not reach is longer."""


def directories(transport: SharedMemoryTransport) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{PREFIX}*-{transport.token}.*"))


def weights() -> list[tuple[str, Tensor]]:
    """Of uneven sizes and dtypes; one is larger than a bucket, one is empty, one a scalar."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 3), (3000,), (), (0, 4), (64, 16), (5,), (1000,), (31, 31)]
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    named = [(f"layer.{number}", tensor) for number, tensor in enumerate(tensors)]
    return [*named, ("steps", torch.arange(9)), ("mask", torch.arange(70) % 3 == 0)]


def on_device(*arguments, **more) -> device_ipc.DeviceIpcTransport:
    return device_ipc.open_transport("cpu", *arguments, **more)


@pytest.fixture(params=[shared_memory.open_transport, on_device], ids=["host", "device"])
def open_transport(request):
    return request.param


@pytest.fixture
def transport(open_transport):
    opened: list[SharedMemoryTransport] = []

    def make(num_readers: int = 1, timeout_s: float = 600.0) -> SharedMemoryTransport:
        opened.append(
            open_transport(
                "bfloat16", frozenset({"layer.1"}), timeout_s, HOST, [1] * num_readers, BUCKET_BYTES
            )
        )
        return opened[-1]

    yield make
    for each in opened:
        each.stop()
        assert not directories(each)


def receive(source: SharedMemorySource, results, pause_s: float = 0.0) -> None:
    checksums = []
    for name, tensor in source.tensors():
        time.sleep(pause_s)
        checksums.append((name, tensor_checksum(tensor, source.checksum_method)))
    results.put((source.reader, combine(checksums), len(checksums)))


def in_processes(sources, work: Callable = receive, *arguments):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    readers = [
        context.Process(target=work, args=(source, results, *arguments), daemon=True)
        for source in sources
    ]
    for reader in readers:
        reader.start()
    return readers, results


def test_every_reader_gets_every_tensor_whatever_its_pace(transport) -> None:
    sending = transport(num_readers=3)
    readers, results = in_processes(sending.sources[:2])
    slow, slow_results = in_processes(sending.sources[2:], receive, 0.02)
    sent = sending.send(iter(weights()))
    found = [
        results.get(timeout=HANG_S),
        results.get(timeout=HANG_S),
        slow_results.get(timeout=HANG_S),
    ]
    for reader in (*readers, *slow):
        reader.join(timeout=HANG_S)
        assert reader.exitcode == 0
    assert sorted(found) == [(n, sent.digest, sent.num_tensors) for n in range(3)]
    assert sent.num_tensors == len(weights())
    cast = [
        (name, t.to(torch.bfloat16) if t.is_floating_point() and name != "layer.1" else t)
        for name, t in weights()
    ]
    method = sending.sources[0].checksum_method
    assert sent.digest == combine((name, tensor_checksum(tensor, method)) for name, tensor in cast)
    assert sent.num_bytes == sum(tensor.nbytes for _, tensor in cast)


def test_each_worker_of_a_receiver_gets_all(open_transport) -> None:
    sending = open_transport("bfloat16", frozenset(), 600.0, HOST, [2, 1], BUCKET_BYTES)
    first, second = sending.sources
    readers, results = in_processes([first, first.of_worker(1), second])
    sent = sending.send(iter(weights()))
    found = sorted(results.get(timeout=HANG_S) for _ in readers)
    sending.stop()
    assert found == [(n, sent.digest, sent.num_tensors) for n in range(3)]


def test_the_memory_is_two_buckets_or_the_largest_tensors() -> None:
    sending = shared_memory.open_transport("float32", frozenset(), HANG_S, HOST, [1], BUCKET_BYTES)
    seen_bytes: list[int] = []

    def watch(source: SharedMemorySource) -> None:
        for _ in source.tensors():
            (directory,) = directories(sending)
            files = directory.glob("bucket-*")
            seen_bytes.append(sum(file.stat().st_size for file in files))

    reader = threading.Thread(target=watch, args=(sending.sources[0],))
    reader.start()
    sending.send((f"w{n}", torch.ones(900)) for n in range(40))
    reader.join()
    sending.stop()
    assert max(seen_bytes) == 2 * BUCKET_BYTES


def _kill_oneself(source: SharedMemorySource, results) -> None:
    results.put("here")
    stream = source.tensors()
    next(stream)
    os.kill(os.getpid(), signal.SIGKILL)


def _give_up(source: SharedMemorySource, _) -> None:
    for number, _item in enumerate(source.tensors()):
        if number == 2:
            raise SystemExit(7)


def test_a_reader_that_gives_up_ends_the_sender_at_once(transport) -> None:
    sending = transport(num_readers=2)
    in_processes(sending.sources[:1])
    in_processes(sending.sources[1:], _give_up)
    start = time.monotonic()
    with pytest.raises(ReceiverGoneError):
        sending.send((f"w{n}", torch.ones(900)) for n in range(1000))
    assert time.monotonic() - start < HANG_S


def test_a_reader_that_was_killed_or_never_came_is_a_deadline(transport) -> None:
    sending = transport()
    _, results = in_processes(sending.sources, _kill_oneself)
    results.get(timeout=HANG_S)
    with pytest.raises(DeadlineError, match="rollout engine 0 to read on"):
        replace(sending, timeout_s=1.0).send((f"w{n}", torch.ones(900)) for n in range(1000))
    with pytest.raises(DeadlineError, match="rollout engine 0 to come"):
        transport(timeout_s=0.2).send(iter(weights()))


def test_a_sender_that_fails_ends_its_readers(transport) -> None:
    def broken():
        yield "a", torch.ones(900)
        raise ZeroDivisionError

    sending = transport()
    failures: list[str] = []

    def read() -> None:
        try:
            list(sending.sources[0].tensors())
        except WeightSyncError as error:
            failures.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(ZeroDivisionError):
        sending.send(broken())
    reader.join(timeout=HANG_S)
    assert failures == ["the trainer gave up while it sent weights"]
    with pytest.raises(DeadlineError, match="the trainer to send weights"):
        list(transport(timeout_s=0.1).sources[0].tensors())


@pytest.mark.parametrize("is_before", [True, False])
def test_the_opener_ends_a_transfer_that_it_cannot_see(transport, is_before: bool) -> None:
    """As when one receiver of several refuses the weights before it reads any."""
    sending = transport(num_readers=2)
    if is_before:
        sending.stop()
    failures: list[str] = []

    def read() -> None:
        with pytest.raises(WeightSyncError, match="the trainer gave up"):
            list(sending.sources[0].tensors())
        failures.append("reader")

    def send() -> None:
        with pytest.raises(ReceiverGoneError):
            sending.send(iter(weights()))
        failures.append("sender")

    threads = [threading.Thread(target=work) for work in (read, send)]
    for thread in threads:
        thread.start()
    if not is_before:
        wait_for(lambda: bool(directories(sending)), "the sender to begin", HANG_S, poll_s=0.01)
        sending.stop()
    for thread in threads:
        thread.join(timeout=HANG_S)
    assert sorted(failures) == ["reader", "sender"]


def on_two_nodes(open_transport, timeout_s: float, *num_workers: int) -> SharedMemoryTransport:
    """As of two replicas, each beside a rank."""
    return open_transport(
        "bfloat16", frozenset(), timeout_s, HOST, num_workers, BUCKET_BYTES, senders=[0, 1]
    )


def send_as(rank: int, sending: SharedMemoryTransport, gathered, results, late_s: float) -> None:
    """Each tensor waits for the other rank, as when ranks gather it together."""

    def tensors():
        for named in weights():
            gathered.wait(HANG_S)
            yield named

    shared_memory.rank, buckets.world_size = lambda: rank, lambda: 2
    time.sleep(late_s)
    try:
        sent = sending.send(tensors())
    except (ReceiverGoneError, DeadlineError) as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    else:
        results.put((rank, sent.digest))


def two_ranks(sending: SharedMemoryTransport, late_s: float = 0.0) -> Callable[[], dict[int, str]]:
    context = multiprocessing.get_context("fork")
    results, gathered = context.Queue(), context.Barrier(2)
    for rank in (0, 1):
        context.Process(
            target=send_as, args=(rank, sending, gathered, results, late_s * rank), daemon=True
        ).start()
    return lambda: dict(results.get(timeout=HANG_S) for _ in range(2))


def test_a_rank_of_each_node_sends_to_its_own_readers(open_transport) -> None:
    sending = on_two_nodes(open_transport, 600.0, 2, 1)
    first, second = sending.sources
    readers, results = in_processes([first, first.of_worker(1), second])
    sent = two_ranks(sending)()
    found = sorted(results.get(timeout=HANG_S) for _ in readers)
    sending.stop()
    assert sent[0] == sent[1]
    assert found == [(n, sent[0], len(weights())) for n in range(3)]
    assert not directories(sending)


def test_a_rank_whose_replicas_take_no_part_sends_nothing(open_transport) -> None:
    """As when one replica was lost and gets the weights late."""
    sending = on_two_nodes(open_transport, 600.0, 0, 1)
    _, results = in_processes(sending.sources[1:])
    sent = two_ranks(sending)()
    sending.stop()
    assert sent[0] == sent[1] == results.get(timeout=HANG_S)[1]


def test_a_reader_that_gives_up_does_not_stop_the_other_node(open_transport) -> None:
    sending = on_two_nodes(open_transport, 600.0, 1, 1)
    _, results = in_processes(sending.sources[:1])
    in_processes(sending.sources[1:], _give_up)
    sent = two_ranks(sending)()
    assert sent[1] == "ReceiverGoneError: a rollout engine gave up while it took weights"
    assert results.get(timeout=HANG_S) == (0, sent[0], len(weights()))
    sending.stop()
    assert not directories(sending)


def test_a_reader_waits_for_the_deadline_of_another_node() -> None:
    """The ranks gather together, so its own rank waits for the other's, and that for a reader."""
    sending = on_two_nodes(shared_memory.open_transport, 1.0, 1, 1)
    _, results = in_processes(sending.sources[:1])
    sent = two_ranks(sending, late_s=0.5)()
    assert sent[1] == "DeadlineError: gave up after 1 s waiting for rollout engine 1 to come"
    assert results.get(timeout=HANG_S) == (0, sent[0], len(weights()))
    sending.stop()


def test_the_opener_ends_the_senders_of_all_nodes(open_transport) -> None:
    sending = on_two_nodes(open_transport, 600.0, 1, 1)
    ranks = two_ranks(sending)
    wait_for(lambda: len(directories(sending)) == 2, "senders", HANG_S, poll_s=0.01)
    sending.stop()
    assert all(text.startswith("ReceiverGoneError") for text in ranks().values())
    assert not directories(sending)


def test_what_a_killed_sender_left_goes_with_the_next(transport) -> None:
    context = multiprocessing.get_context("fork")
    dead, alive = transport(), transport()
    others = [context.Process(target=each.send, args=([],)) for each in (dead, alive)]
    for each in others:
        each.start()
    wait_for(lambda: bool(directories(dead) and directories(alive)), "senders", HANG_S, poll_s=0.01)
    others[0].kill()
    others[0].join(timeout=HANG_S)
    with pytest.raises(DeadlineError):
        transport(timeout_s=0.0).send(iter([]))
    assert not directories(dead)
    assert directories(alive), "its sender lives"
    alive.stop()
    others[1].join(timeout=HANG_S)


def test_the_receiver_frees_the_memory_of_a_killed_sender(transport) -> None:
    sending = transport()

    def endless():
        yield from ((f"w{n}", torch.ones(900)) for n in range(1_000_000))

    sender = multiprocessing.get_context("fork").Process(target=sending.send, args=(endless(),))
    sender.start()
    received = sending.sources[0].tensors()
    next(received)
    sender.kill()
    sender.join(timeout=HANG_S)
    assert directories(sending)
    sending.stop()
    # A bucket that was not opened yet ended with the sender.
    with pytest.raises(WeightSyncError, match="the trainer gave up|on the trainer's device"):
        list(received)
    assert not directories(sending)


def test_the_opener_needs_no_memory_in_common_with_the_others(transport, tmp_path: Path) -> None:
    """As a driver on a head node without devices; the node of the ranks has a `/dev/shm`."""
    node = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    own_memory = "mount -t tmpfs tmpfs /dev/shm"
    try:
        subprocess.run([*node, own_memory], check=True, capture_output=True, timeout=HANG_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs namespaces of users and mounts: {error}")
    sending = transport(num_readers=2)
    order = tmp_path / "transport"
    order.write_bytes(pickle.dumps(sending))
    started = [*node, f'{own_memory} && exec "$@"', "sh", sys.executable, str(NODE), str(order)]
    ended = subprocess.run(
        started,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=env.child_environment(PYTHONPATH=str(Path(__file__).parents[4])),
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["left"] == []
    assert found["held"] == [found["sent"]] * 2
    assert found["directory"].startswith(f"{SHARED_MEMORY}/{PREFIX}")
    assert not directories(sending)
