"""Weights through shared memory, between real processes."""

import multiprocessing
import os
import signal
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
from engines.weight_sync.base import ReceiverGoneError
from engines.weight_sync.shared_memory import (
    SHARED_MEMORY,
    SharedMemorySource,
    SharedMemoryTransport,
    open_transport,
)
from infra.errors import DeadlineError
from infra.waiting import wait_for

BUCKET_BYTES = 4096
HANG_S = 60.0
"""Guard against hanging; a deadline that a test must not reach is longer."""


def weights() -> list[tuple[str, Tensor]]:
    """Of uneven sizes and dtypes; one is larger than a bucket, one is empty, one a scalar."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 3), (3000,), (), (0, 4), (64, 16), (5,), (1000,), (31, 31)]
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    named = [(f"layer.{number}", tensor) for number, tensor in enumerate(tensors)]
    return [*named, ("steps", torch.arange(9)), ("mask", torch.arange(70) % 3 == 0)]


@pytest.fixture
def transport():
    opened: list[SharedMemoryTransport] = []

    def make(num_readers: int = 1, timeout_s: float = 600.0) -> SharedMemoryTransport:
        opened.append(
            open_transport(
                "bfloat16", frozenset({"layer.1"}), timeout_s, [1] * num_readers, BUCKET_BYTES
            )
        )
        return opened[-1]

    yield make
    for each in opened:
        each.stop()
        assert not each.directory.exists()


def receive(source: SharedMemorySource, results, pause_s: float = 0.0) -> None:
    checksums = []
    for name, tensor in source.tensors():
        time.sleep(pause_s)
        checksums.append((name, tensor_checksum(tensor)))
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
    assert sent.digest == combine((name, tensor_checksum(tensor)) for name, tensor in cast)
    assert sent.num_bytes == sum(tensor.nbytes for _, tensor in cast)


def test_each_worker_of_a_receiver_gets_all() -> None:
    sending = open_transport("bfloat16", frozenset(), 600.0, [2, 1], BUCKET_BYTES)
    first, second = sending.sources
    readers, results = in_processes([first, first.of_worker(1), second])
    sent = sending.send(iter(weights()))
    found = sorted(results.get(timeout=HANG_S) for _ in readers)
    sending.stop()
    assert found == [(n, sent.digest, sent.num_tensors) for n in range(3)]


def test_the_memory_is_two_buckets_or_the_largest_tensors(transport) -> None:
    sending = transport()
    seen_bytes: list[int] = []

    def watch(source: SharedMemorySource) -> None:
        for _ in source.tensors():
            files = sending.directory.glob("bucket-*")
            seen_bytes.append(sum(file.stat().st_size for file in files))

    reader = threading.Thread(target=watch, args=(sending.sources[0],))
    reader.start()
    sending.send((f"w{n}", torch.ones(900)) for n in range(40))
    reader.join()
    assert max(seen_bytes) == 2 * BUCKET_BYTES


def _kill_oneself(source: SharedMemorySource, _) -> None:
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
    in_processes(sending.sources, _kill_oneself)
    wait_for((sending.directory / "reader-0").exists, "the reader to come", HANG_S, poll_s=0.01)
    with pytest.raises(DeadlineError, match="rollout engine 0 to read on"):
        replace(sending, timeout_s=0.5).send((f"w{n}", torch.ones(900)) for n in range(1000))
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


def test_what_a_killed_sender_left_goes_with_the_next(transport) -> None:
    context = multiprocessing.get_context("fork")
    left, may_die = context.Queue(), context.Event()

    def die() -> None:
        left.put(str(open_transport("float32", frozenset(), 1.0, [1]).directory))
        may_die.wait(HANG_S)
        os.kill(os.getpid(), signal.SIGKILL)

    sender = context.Process(target=die)
    sender.start()
    directory = Path(left.get(timeout=HANG_S))
    assert directory.parent == SHARED_MEMORY
    assert directory.exists()
    other = transport()
    assert directory.exists(), "its owner lives"
    may_die.set()
    sender.join(timeout=HANG_S)
    transport()
    assert not directory.exists()
    assert other.directory.exists()
