"""Broadcasts weights from a trainer's rank with full tensors to rollout engines on any machine.

A broadcast channel is a process group of one sender and all readers of a transfer. Two buckets are
used in turn: the sender fills one while the other is sent, and a reader takes tensors out of one
while the other arrives. A message before each bucket describes it. Collectives run in a thread of
their own, so that a missing process cannot block the caller.
Promises: nothing is sent before every reader has come. Extra memory is two buckets on each side,
and the sender's cast of one tensor. If one side fails or does not come, the others end with an
error that names it, by the deadline. The thread and its process group end with the collective that
is running, at the latest at the group's timeout.
Does not promise encryption. Checksums of entries are passed on, not verified.
"""

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    _DistributedBackendOptions,
)
from torch.distributed import distributed_c10d

from engines.collectives import rank
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.buckets import (
    CastStream,
    Entry,
    Packer,
    entries_from_json,
    entries_to_json,
    in_step,
    settle,
)
from engines.weight_sync.rendezvous import (
    GRACE_S,
    WATCH_S,
    Rendezvous,
    RendezvousSource,
    RendezvousTransport,
    first_line,
)
from infra import env
from infra.errors import DeadlineError, PipelineError
from infra.waiting import in_thread

NUM_BUCKETS = 2
ALL_CAME, ALL_TAKEN = "all came", "all taken"
WEIGHTS_TO_COME = "the trainer to send weights"

Bucket = tuple[list[Entry], Tensor]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class CollectiveSource(RendezvousSource):
    """Source that reads the broadcast of rank 0."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, valid until the next one."""
        with self.join() as rendezvous:
            rendezvous.announce()
            with receiving(rendezvous) as entries:
                for entry, tensor in entries:
                    yield entry.name, tensor


@dataclass(frozen=True)
class CollectiveTransport(RendezvousTransport):
    """Transport in which rank 0 broadcasts; a tensor larger than a bucket enlarges the bucket."""

    source_type: ClassVar[type[RendezvousSource]] = CollectiveSource

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`; rank 0 sends, the other ranks only compute the digest."""
        dtype, method = getattr(torch, self.dtype), self.sources[0].checksum_method
        stream = CastStream(tensors, dtype, self.float32_names, method)
        with in_step(stream):
            if rank() == 0:
                with (
                    self.sources[0].join(ReceiverGoneError) as rendezvous,
                    sending(rendezvous, self.bucket_bytes) as packer,
                ):
                    stream.pack(packer)
        return stream.sent


@contextmanager
def sending(rendezvous: Rendezvous, bucket_bytes: int) -> Iterator[Packer]:
    """Wait for all readers, yield a packer that broadcasts its buckets, wait until all are read.

    Raises:
        ReceiverGoneError: a process gave up.
        DeadlineError: a reader did not come, or stopped reading.
    """
    rendezvous.await_readers("reader", "come")
    rendezvous.say(ALL_CAME)
    sender = _BucketSender(rendezvous)
    try:
        packer = Packer(bucket_bytes, sender.open_bucket, sender.publish)
        yield packer
        packer.flush()
        sender.finish()
        rendezvous.await_readers("taken", "read on")
        rendezvous.say(ALL_TAKEN)
    finally:
        sender.thread.put(None)


@contextmanager
def receiving(rendezvous: Rendezvous) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """Yield the (entry, tensor) pairs of a sender; call `Rendezvous.announce` before.

    A tensor is a view of a bucket, valid until the next one. The pairs must be read to the end.

    Raises:
        WeightSyncError: a process gave up.
        DeadlineError: a process did not come, or nothing arrived.
    """
    source = rendezvous.source
    # The sender waits less long, so its error names the process that did not come.
    patience_s = source.timeout_s + GRACE_S
    rendezvous.wait(ALL_CAME, "every rollout engine to connect", patience_s)
    device = _device(source)
    thread = CollectiveThread[Tensor, Bucket](rendezvous, partial(_fetch, rendezvous, device))
    try:
        for _ in range(NUM_BUCKETS):
            thread.put(_memory(0, device))
        yield _entries(thread, source.timeout_s)
        rendezvous.say(f"taken {source.reader}")
        # A reader whose group ends before the others are done would break their connections.
        rendezvous.wait(ALL_TAKEN, "every rollout engine to take the weights", patience_s)
    finally:
        thread.put(None)


class CollectiveThread(Generic[Item, Result]):
    """Runs `work` in a thread: a generator from the items of `put` to the results of `get`."""

    def __init__(
        self, rendezvous: Rendezvous, work: Callable[[Iterator[Item]], Iterator[Result]]
    ) -> None:
        self._rendezvous, self._work = rendezvous, work
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._ended = in_thread(self._run, "weights")

    def put(self, item: Item | None) -> None:
        """Pass an item to the thread; None ends it."""
        self._items.put(item)

    def get(self, what: str, timeout_s: float) -> Result:
        """Return the next result; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up, or the collective failed.
            DeadlineError: nothing came within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while True:
            self._rendezvous.check()
            try:
                return self._results.get(timeout=WATCH_S)
            except queue.Empty:
                if self._ended.done():
                    self._raise_failure()
                if time.monotonic() > end:
                    raise DeadlineError(what, timeout_s) from None

    def _run(self) -> None:
        for result in self._work(iter(self._items.get, None)):
            self._results.put(result)
            del result  # the caller may free a bucket while the next one is on its way

    def _raise_failure(self) -> NoReturn:
        self._rendezvous.check()  # that process's own error says more than a broken connection
        error = self._ended.exception()
        if isinstance(error, PipelineError):
            raise error
        raise self._rendezvous.error(
            f"a peer of the broadcast is gone: {first_line(error)}"
        ) from error


class _BucketSender:
    """The sender's buckets; a thread broadcasts one while the other is filled."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._device = rendezvous, _device(rendezvous.source)
        self._numbers = itertools.count()
        self._memory = _memory(0, self._device)
        self.thread = CollectiveThread[Bucket, Tensor](rendezvous, self._broadcast)

    def open_bucket(self, num_bytes: int) -> Tensor:
        """Wait for a free bucket and return its memory, of at least `num_bytes`."""
        self._memory = self._free_bucket()
        if self._memory.numel() < num_bytes:
            self._memory = _memory(0, self._device)  # free the old one first
            self._memory = _memory(num_bytes, self._device)
        return self._memory

    def publish(self, entries: Sequence[Entry]) -> None:
        """Send the bucket that was opened last."""
        settle(self._memory)  # the thread uses another stream
        self.thread.put((list(entries), self._memory))

    def finish(self) -> None:
        """Wait until all was sent, and announce the end."""
        for _ in range(NUM_BUCKETS):
            self._free_bucket()
        self._announce([])

    def _announce(self, entries: Sequence[Entry]) -> None:
        self._rendezvous.say(str(next(self._numbers)), entries_to_json(entries))

    def _free_bucket(self) -> Tensor:
        timeout_s = self._rendezvous.source.timeout_s
        return self.thread.get("the rollout engines to read on", timeout_s)

    def _broadcast(self, filled: Iterator[Bucket]) -> Iterator[Tensor]:
        """Yield empty buckets, then each bucket once it was sent; runs in the thread.

        A bucket is announced right before its broadcast: no reader waits for one that never comes.
        """
        for _ in range(NUM_BUCKETS):
            yield _memory(0, self._device)
        group = _group(self._rendezvous, 0)
        for entries, memory in filled:
            self._announce(entries)
            group.broadcast(memory[: entries[-1].end_bytes])
            yield memory


def _fetch(
    rendezvous: Rendezvous, device: torch.device, free: Iterator[Tensor]
) -> Iterator[Bucket]:
    """Yield each free bucket once it is filled, the last one without entries; runs in a thread."""
    source = rendezvous.source
    group = _group(rendezvous, source.reader + 1)
    numbers = itertools.count()  # `enumerate` would keep a reference to the old memory
    for memory in free:
        entries = entries_from_json(
            rendezvous.wait(str(next(numbers)), WEIGHTS_TO_COME, source.timeout_s)
        )
        if not entries:
            yield entries, memory
            break
        num_bytes = entries[-1].end_bytes
        if memory.numel() < num_bytes:
            del memory  # free the old one first
            memory = _memory(num_bytes, device)
        group.broadcast(memory[:num_bytes])
        yield entries, memory
    for _ in free:  # the group stays until the reader leaves
        pass


def _entries(
    thread: CollectiveThread[Tensor, Bucket], timeout_s: float
) -> Iterator[tuple[Entry, Tensor]]:
    while (bucket := thread.get(WEIGHTS_TO_COME, timeout_s))[0]:
        entries, memory = bucket
        for entry in entries:
            yield entry, entry.view(memory)
        thread.put(memory)
        del bucket, memory


def _group(rendezvous: Rendezvous, number: int) -> "BroadcastGroup":
    source = rendezvous.source
    return BroadcastGroup(
        source.backend,
        rendezvous.store,
        number,
        source.num_readers + 1,
        rendezvous.address,
        source.timeout_s + GRACE_S,
    )


def _device(source: RendezvousSource) -> torch.device:
    """Return the current device of the calling thread; the collective thread has another."""
    if source.device_name == "cpu":
        return torch.device("cpu")
    return torch.device(source.device_name, torch.accelerator.current_device_index())


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class BroadcastGroup:
    """Process group in which process 0 broadcasts; independent of the default process group.

    All its processes construct it together, or get a RuntimeError. `backend` may be registered by a
    package; `timeout_s` limits each collective. `address` is where the others reach this machine,
    if the environment names no interface.
    """

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, address: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "gloo":
            gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            gloo._timeout = timeout
            interfaces = env.GLOO_SOCKET_IFNAME.get()
            gloo._devices = (
                [ProcessGroupGloo.create_device(interface=each) for each in interfaces.split(",")]
                if interfaces
                # By default torch takes the interface that has the host's name.
                else [ProcessGroupGloo.create_device(hostname=address)]
            )
            self._group = ProcessGroupGloo(store, rank, size, gloo)
        elif backend == "nccl":
            # Exists only in device builds of torch.
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, nccl)
        else:
            plugin = distributed_c10d.Backend._plugins[backend.upper()]
            if plugin.extended_api:
                options = _DistributedBackendOptions()
                options.store, options.group_rank, options.group_size = store, rank, size
                options.timeout, options.group_id = timeout, "weights"
                options.global_ranks_in_group = list(range(size))
                self._group = plugin.creator_fn(options, None)
            else:
                self._group = plugin.creator_fn(store, rank, size, timeout)

    def broadcast(self, memory: Tensor) -> None:
        """Broadcast bytes of process 0 into memory of equal size elsewhere; blocks until done."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` blocks only the stream
