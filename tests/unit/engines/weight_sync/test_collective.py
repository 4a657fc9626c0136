"""Weights by broadcast, between real processes and through gloo."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from engines.checksum import combine, tensor_checksum
from engines.collectives import init_single_process_group, open_store
from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import source_from_json, source_to_json
from engines.weight_sync import buckets
from engines.weight_sync.base import ReceiverGoneError
from engines.weight_sync.collective import CollectiveSource, CollectiveTransport
from engines.weight_sync.communicator import BroadcastGroup, close_communicators
from engines.weight_sync.shared_memory import open_transport as open_shared_memory
from hardware.cpu import CPUPlatform
from infra.errors import DeadlineError

HOST = "127.0.0.1"
BUCKET_BYTES = 4096
HANG_S = 60.0
"""Guard against hanging; a deadline that a test must not reach is longer."""
# Not forks of this process: threads of gloo may be left in it.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["engines.weight_sync.collective"])


def weights() -> list[tuple[str, Tensor]]:
    """Of uneven sizes and dtypes; one is larger than a bucket, one is empty, one a scalar."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 3), (3000,), (), (0, 4), (64, 16), (5,), (1000,), (31, 31)]
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    named = [(f"layer.{number}", tensor) for number, tensor in enumerate(tensors)]
    return [*named, ("steps", torch.arange(9)), ("mask", torch.arange(70) % 3 == 0)]


def endless():
    for number in range(100_000):
        yield f"w{number}", torch.ones(900)


def transport(num_receivers: int = 1, timeout_s: float = 600.0, server: TCPStore | None = None):
    return CollectiveTransport.open(
        "bfloat16", {"layer.1"}, timeout_s, HOST, [1] * num_receivers,
        bucket_bytes=BUCKET_BYTES, server=server,
    )  # fmt: skip


def communicators_made() -> list[object]:
    """Communicators that this process makes from now on."""
    made: list[object] = []
    make = BroadcastGroup.__init__

    def counted(self, *arguments) -> None:
        made.append(self)
        make(self, *arguments)

    BroadcastGroup.__init__ = counted
    return made


def read_each(source: CollectiveSource, results, later) -> None:
    made, found = communicators_made(), []
    for each in (source, *later):
        found.append((combine((n, tensor_checksum(t)) for n, t in each.tensors()), len(made)))
    results.put(found)


def receive(source, results, pause_s: float = 0.0) -> None:
    source = source_from_json(source_to_json(source))
    found = []
    try:
        for name, tensor in source.tensors():
            time.sleep(pause_s)
            found.append((name, tensor_checksum(tensor), str(tensor.dtype), tuple(tensor.shape)))
    except (WeightSyncError, DeadlineError) as error:
        found = [f"{type(error).__name__}: {error}"]
    receiver = getattr(source, "reader", None)
    results.put((receiver, found, dist.is_initialized()))


def kill_oneself(source: CollectiveSource, _) -> None:
    stream = source.tensors()
    next(stream)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_oneself(source: CollectiveSource, _) -> None:
    stream = source.tensors()
    next(stream)
    os.kill(os.getpid(), signal.SIGSTOP)


def give_up(source: CollectiveSource, _) -> None:
    for number, _item in enumerate(source.tensors()):
        if number == 2:
            raise SystemExit(7)


def wait_until_come(source: CollectiveSource) -> None:
    source.join().wait(f"reader {source.reader}", "the reader to come", HANG_S)


def impatient(sending: CollectiveTransport, timeout_s: float) -> CollectiveTransport:
    """The same transfer, whose sender alone has another deadline."""
    return replace(sending, sources=tuple(replace(s, timeout_s=timeout_s) for s in sending.sources))


@pytest.fixture
def in_processes():
    started, queues = [], []

    def start(sources, work: Callable = receive, *arguments):
        results = PROCESSES.Queue()
        queues.append(results)
        for source in sources:
            process = PROCESSES.Process(
                target=work, args=(source, results, *arguments), daemon=True
            )
            process.start()
            started.append(process)
        return results

    yield start
    for process in started:
        process.kill()
        process.join()


def test_every_receiver_gets_same_tensors_as_by_shared_memory(in_processes) -> None:
    sending = transport(num_receivers=2)
    results = in_processes(sending.sources[:1])
    slow = in_processes(sending.sources[1:], receive, 0.02)
    # As it travels to the rank that sends.
    sent = pickle.loads(pickle.dumps(sending)).send(iter(weights()))
    _, one, _ = results.get(timeout=HANG_S)
    _, other, _ = slow.get(timeout=HANG_S)
    shared = open_shared_memory("bfloat16", frozenset({"layer.1"}), 600.0, HOST, [1], BUCKET_BYTES)
    through_memory = in_processes(shared.sources)
    assert shared.send(iter(weights())) == sent
    _, read, _ = through_memory.get(timeout=HANG_S)
    shared.stop()
    assert one == other == read
    assert sent.digest == combine((name, checksum) for name, checksum, _, _ in one)
    assert sent.num_tensors == len(weights()) == len(one)
    kinds = {name: dtype for name, _, dtype, _ in one}
    assert kinds["layer.1"] == "torch.float32"
    assert kinds["layer.0"] == "torch.bfloat16"
    assert kinds["steps"] == "torch.int64"


def test_a_default_group_is_neither_needed_nor_touched(in_processes) -> None:
    sending = transport()
    results = in_processes(sending.sources)
    init_single_process_group(CPUPlatform(), HANG_S)
    try:
        before = dist.group.WORLD
        sending.send(iter(weights()))
        assert dist.group.WORLD is before
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert results.get(timeout=HANG_S)[2] is False


def test_the_memory_is_two_buckets_on_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.weight_sync import collective

    made: list[int] = []
    empty = collective._memory

    def count(num_bytes: int, device: torch.device) -> Tensor:
        made.append(num_bytes)
        return empty(num_bytes, device)

    monkeypatch.setattr(collective, "_memory", count)
    sending = transport()
    reader = threading.Thread(target=lambda: list(sending.sources[0].tensors()))
    reader.start()
    sending.send((f"w{n}", torch.ones(900)) for n in range(40))
    reader.join(timeout=HANG_S)
    received = [num_bytes for num_bytes in made if 0 < num_bytes < BUCKET_BYTES]
    assert made.count(BUCKET_BYTES) == 2, "the sender's"
    assert len(received) == 2
    assert sum(made) <= 4 * BUCKET_BYTES


def test_transfer_makes_a_communicator_only_for_new_processes(
    in_processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BroadcastGroup, "__init__", BroadcastGroup.__init__)  # restored at the end
    made = communicators_made()
    server = open_store(3, 600.0, HOST)
    first, second, third, fourth = (transport(2, server=server) for _ in range(4))
    stays = in_processes(
        first.sources[:1], read_each, [each.sources[0] for each in (second, third, fourth)]
    )
    ends = in_processes(first.sources[1:], read_each, second.sources[1:])
    sent = [first.send(iter(weights())), second.send(iter(weights()))]
    assert len(made) == 1
    assert ends.get(timeout=HANG_S) == [(sent[0].digest, 1), (sent[1].digest, 1)]
    # As a replica that was lost and started again.
    replaced = in_processes(third.sources[1:], read_each, fourth.sources[1:])
    for each in (third, fourth):
        sent.append(each.send(iter(weights())))
    assert len(made) == 2
    digest = sent[0].digest
    assert {each.digest for each in sent} == {digest}
    assert replaced.get(timeout=HANG_S) == [(digest, 1), (digest, 1)]
    assert stays.get(timeout=HANG_S) == [(digest, 1), (digest, 1), (digest, 2), (digest, 2)]
    close_communicators()


def test_a_failed_transfer_leaves_no_communicator(
    in_processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BroadcastGroup, "__init__", BroadcastGroup.__init__)
    made = communicators_made()
    server = open_store(2, 600.0, HOST)
    broken, whole = (transport(server=server) for _ in range(2))
    in_processes(broken.sources, give_up)
    with pytest.raises(ReceiverGoneError):
        broken.send(endless())
    results = in_processes(whole.sources, read_each, [])
    sent = whole.send(iter(weights()))
    assert results.get(timeout=HANG_S) == [(sent.digest, 1)]
    assert len(made) == 2
    close_communicators()


def test_each_worker_of_a_receiver_gets_all(in_processes) -> None:
    sending = CollectiveTransport.open(
        "bfloat16", {"layer.1"}, 600.0, HOST, [2, 1], bucket_bytes=BUCKET_BYTES
    )
    first, second = sending.sources
    results = in_processes([first, first.of_worker(1), second])
    sending.send(iter(weights()))
    got = [results.get(timeout=HANG_S) for _ in range(3)]
    assert sorted(reader for reader, _, _ in got) == [0, 1, 2]
    assert all(found == got[0][1] for _, found, _ in got)


@pytest.mark.parametrize(("work", "said"), [(kill_oneself, "gone"), (give_up, "engine 1 gave up")])
def test_a_receiver_that_ends_ends_the_others_at_once(in_processes, work, said) -> None:
    sending = transport(num_receivers=2)
    results = in_processes(sending.sources[:1])
    in_processes(sending.sources[1:], work)
    start = time.monotonic()
    with pytest.raises(ReceiverGoneError, match=said):
        sending.send(endless())
    _, (error,), _ = results.get(timeout=HANG_S)
    assert error.startswith("WeightSyncError: ")
    assert time.monotonic() - start < HANG_S


@pytest.mark.parametrize("shared", [False, True])
def test_rank_whose_receiver_is_gone_still_gathers_with_others(
    in_processes, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Each tensor is put together by all ranks: one that stopped would leave them waiting."""
    asked_for: list[int] = []

    def counted():
        for number in range(500):
            asked_for.append(number)
            yield f"w{number}", torch.ones(900)

    monkeypatch.setattr(buckets, "world_size", lambda: 2)
    with ExitStack() as opened:
        if shared:
            sending = open_shared_memory("float32", frozenset(), 600.0, HOST, [1], BUCKET_BYTES)
        else:
            sending = transport()
        opened.callback(sending.stop)
        in_processes(sending.sources, give_up)
        with pytest.raises(ReceiverGoneError):
            sending.send(counted())
    assert asked_for == list(range(500))


def test_a_receiver_that_stands_still_is_a_deadline(in_processes) -> None:
    sending = transport()
    in_processes(sending.sources, stop_oneself)
    wait_until_come(sending.sources[0])
    with pytest.raises(DeadlineError, match="the rollout engines to read on"):
        impatient(sending, 1.0).send(endless())


def test_nothing_is_sent_before_every_receiver_has_come(in_processes) -> None:
    sending = transport(num_receivers=2)
    results = in_processes(sending.sources[:1])

    def untouched():
        raise AssertionError("a tensor was asked for")
        yield

    wait_until_come(sending.sources[0])
    with pytest.raises(DeadlineError, match="rollout engine 1 to come"):
        impatient(sending, 1.0).send(untouched())
    _, (error,), _ = results.get(timeout=HANG_S)
    assert error.endswith("the trainer: gave up after 1 s waiting for rollout engine 1 to come")


def test_a_sender_that_fails_ends_its_receivers(in_processes) -> None:
    def broken():
        yield "a", torch.ones(900)
        raise ZeroDivisionError

    sending = transport()
    results = in_processes(sending.sources)
    with pytest.raises(ZeroDivisionError):
        sending.send(broken())
    _, found, _ = results.get(timeout=HANG_S)
    assert found == ["WeightSyncError: the trainer gave up while it sent weights"]


def send_and_die(sending, _) -> None:
    def tensors():
        for number, item in enumerate(endless()):
            if number == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    sending.send(tensors())


def test_killed_sender_is_a_deadline_or_lost_connection_error(in_processes) -> None:
    sending = transport(timeout_s=2.0)
    results = in_processes(sending.sources)
    wait_until_come(sending.sources[0])
    in_processes([sending], send_and_die)
    _, (error,), _ = results.get(timeout=HANG_S)
    assert "the trainer to send weights" in error or "of the broadcast is gone" in error


@pytest.mark.parametrize("num_readers", [0, 1])
def test_stop_ends_a_send_that_waits(in_processes, num_readers: int) -> None:
    sending = transport(num_receivers=1 + num_readers, timeout_s=600.0)
    results = in_processes(sending.sources[:num_readers])
    in_processes(sending.sources[num_readers:], stop_oneself)
    for source in sending.sources:
        wait_until_come(source)
    threading.Timer(0.5, sending.stop).start()
    start = time.monotonic()
    with pytest.raises(ReceiverGoneError, match="gave up"):
        sending.send(endless())
    assert time.monotonic() - start < HANG_S
    for _ in range(num_readers):
        assert "gave up" in results.get(timeout=HANG_S)[1][0]
    sending.stop()


def test_stop_before_anyone_came_ends_a_send() -> None:
    sending = transport(timeout_s=600.0)
    threading.Timer(0.2, sending.stop).start()
    with pytest.raises(ReceiverGoneError):
        sending.send(iter(weights()))


def test_a_source_is_read_once(in_processes) -> None:
    sending = transport()
    results = in_processes([*sending.sources, *sending.sources])
    with pytest.raises(ReceiverGoneError, match="weights for rollout engine 0 are read twice"):
        sending.send(endless())
    for _ in range(2):
        assert "are read twice" in results.get(timeout=HANG_S)[1][0]


def test_a_source_of_a_transfer_that_is_over_says_so() -> None:
    sending = transport()
    (source,) = sending.sources
    del sending
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"the transfer of weights at 127\.0\.0\.1:\d+ is ov"):
        list(source.tensors())
    assert time.monotonic() - start < HANG_S
