"""Weights from a trainer to rollout engines on any machine, broadcast by a rank with full tensors.

Promises: those of `lane`. If one side fails or does not come, the others end with an error that
names it, by the deadline. The traffic is not encrypted.

Run collectives in a thread of their own, so that a missing process cannot block the caller.

Promises: the caller waits at most until its deadline and stops when any process gave up. The thread
and its process group end with the collective that is running, at the latest at the group's timeout.

Broadcast of one sender to every reader of a transfer, through a process group of its own.

Two buckets are used in turn: the sender fills one while the other is sent, and a reader takes
tensors out of one while the other arrives. A message ahead of each bucket describes it.
Promises: nothing is sent before every reader has come. Two buckets on each side are all the extra
memory. Checksums are passed on, not verified.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

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
from engines.errors import WeightSyncError
from engines.weight_sync.base import ReceiverGoneError, WeightDigest
from engines.weight_sync.buckets import (
    Entry,
    OutgoingStream,
    Packer,
    entries_from_json,
    entries_to_json,
    in_step,
)
from engines.weight_sync.rendezvous import (
    GRACE_S,
    SENT,
    TRAINER,
    WATCH_S,
    Meeting,
    MeetingSource,
    MeetingTransport,
    attend,
    first_line,
)
from infra.errors import DeadlineError, PipelineError

Given = TypeVar("Given")
Brought = TypeVar("Brought")


class Courier(Generic[Given, Brought]):
    """A worker thread that exchanges items with its caller; `errand` calls `next` and `bring`."""

    def __init__(
        self, meeting: Meeting, errand: Callable[["Courier[Given, Brought]"], None]
    ) -> None:
        self._meeting, self._errand = meeting, errand
        self._given: queue.SimpleQueue[Given | None] = queue.SimpleQueue()
        self._brought: queue.SimpleQueue[Brought | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def give(self, item: Given) -> None:
        """Pass an item to the thread."""
        self._given.put(item)

    def leave(self) -> None:
        """Tell the thread to end."""
        self._given.put(None)

    def take(self, what: str, timeout_s: float) -> Brought:
        """Return the next item that the thread brings; `what` names it in the error text.

        Raises:
            WeightSyncError: a process gave up, or the collective failed.
            DeadlineError: nothing came within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        self._meeting.check()
        while True:
            try:
                item = self._brought.get(timeout=WATCH_S)
            except queue.Empty:
                self._meeting.check()
                if time.monotonic() > end:
                    raise DeadlineError(what, timeout_s) from None
                continue
            if isinstance(item, Exception):
                self._meeting.check()  # that process's own error says more than a broken connection
                raise item
            return item

    def next(self) -> Given | None:
        """Return the caller's next item, None once it left; called in the thread."""
        return self._given.get()

    def bring(self, item: Brought) -> None:
        """Pass an item to the caller; called in the thread."""
        self._brought.put(item)

    def _run(self) -> None:
        try:
            self._errand(self)
        except PipelineError as error:
            self._brought.put(error)
        except Exception as error:  # noqa: BLE001  thread boundary: raised by take()
            lost = self._meeting.error(f"a process of the broadcast is gone: {first_line(error)}")
            lost.__cause__ = error
            self._brought.put(lost)


class BroadcastGroup:
    """Process group in which process 0 broadcasts; independent of the default process group.

    All its processes construct it together, or get a RuntimeError. `backend` may be registered by a
    package; `address` is where the others reach this machine; `timeout_s` limits each collective.
    """

    def __init__(
        self, backend: str, store: Store, rank: int, size: int, address: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        if backend == "gloo":
            gloo: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            gloo._timeout = timeout
            # By default the interface follows from the host name or an environment variable.
            gloo._devices = [ProcessGroupGloo.create_device(hostname=address)]
            self._group = ProcessGroupGloo(store, rank, size, gloo)
        elif backend == "nccl":
            # Exists only in device builds of torch.
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = ProcessGroupNCCL(store, rank, size, nccl)
        else:
            self._group = _registered(backend, store, rank, size, timeout)

    def broadcast(self, memory: Tensor) -> None:
        """Broadcast bytes of process 0 into memory of equal size elsewhere; blocks until done."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` blocks only the stream


def settle(memory: Tensor) -> None:
    """Wait until all work queued on this memory's device is done."""
    if memory.device.type != "cpu":
        torch.accelerator.synchronize(memory.device)


def _registered(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    plugin = distributed_c10d.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = timeout, "weights"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


NUM_BUCKETS = 2
ALL_CAME, ALL_TAKEN = "all came", "all taken"

Bucket = tuple[list[Entry], Tensor]


def come(source: MeetingSource, meeting: Meeting) -> None:
    """Tell a sender that its reader is there; raise WeightSyncError if it has come before."""
    if meeting.count(f"reader {source.reader}") > 1:
        raise WeightSyncError(f"weights for rollout engine {source.reader} are read twice")


def read_lane(
    source: MeetingSource, meeting: Meeting, address: str
) -> Generator[tuple[Entry, Tensor], None, None]:
    """Yield (entry, tensor) of what one sender broadcasts; `come` must have been called.

    A tensor is a view of a bucket, valid until the next one.

    Raises:
        WeightSyncError: a process gave up.
        DeadlineError: a process did not come, or nothing arrived.
    """
    # The sender waits less long, so its error names the process that did not come.
    patience_s = source.timeout_s + GRACE_S
    meeting.wait(ALL_CAME, "every rollout engine to come", patience_s)
    device = _device(source)
    courier = Courier[Tensor, Bucket](meeting, _Fetching(source, meeting, address, device).run)
    try:
        for _ in range(NUM_BUCKETS):
            courier.give(_memory(0, device))
        while (bucket := courier.take("the trainer to send weights", source.timeout_s))[0]:
            entries, memory = bucket
            for entry in entries:
                yield entry, entry.view(memory)
            courier.give(memory)
            del bucket, memory
        meeting.say(f"taken {source.reader}")
        # A reader whose group ends before the others are done would break their connections.
        meeting.wait(ALL_TAKEN, "every rollout engine to take the weights", patience_s)
    finally:
        courier.leave()


def send_lane(
    source: MeetingSource,
    meeting: Meeting,
    address: str,
    bucket_bytes: int,
    fill: Callable[[Packer], None],
) -> None:
    """Wait for every reader, broadcast what `fill` packs, and wait until all have read.

    Raises:
        ReceiverGoneError: a process gave up.
        DeadlineError: a reader did not come, or stopped reading.
    """
    _await_each(source, meeting, "reader", "come")
    meeting.say(ALL_CAME)
    sending = _Sending(source, meeting, address)
    try:
        packer = Packer(bucket_bytes, sending.open_bucket, sending.publish)
        fill(packer)
        packer.flush()
        sending.finish()
        _await_each(source, meeting, "taken", "read on")
        meeting.say(ALL_TAKEN)
    finally:
        sending.courier.leave()


def _await_each(source: MeetingSource, meeting: Meeting, key: str, to: str) -> None:
    for reader in range(source.num_readers):
        meeting.wait(f"{key} {reader}", f"rollout engine {reader} to {to}", source.timeout_s)


def _group(source: MeetingSource, meeting: Meeting, address: str, place: int) -> BroadcastGroup:
    return BroadcastGroup(
        source.backend,
        meeting.store,
        place,
        source.num_readers + 1,
        address,
        source.timeout_s + GRACE_S,
    )


class _Sending:
    def __init__(self, source: MeetingSource, meeting: Meeting, address: str) -> None:
        self._source, self._meeting, self._address = source, meeting, address
        self._device = _device(source)
        self._number = 0
        self._memory = _memory(0, self._device)
        self.courier = Courier[Bucket, Tensor](meeting, self._run)

    def open_bucket(self, num_bytes: int) -> Tensor:
        """Return memory of the first free bucket."""
        self._memory = self._take()
        if self._memory.numel() < num_bytes:
            self._memory = _memory(0, self._device)  # free the old one first
            self._memory = _memory(num_bytes, self._device)
        return self._memory

    def publish(self, entries: Sequence[Entry]) -> None:
        """Send the bucket that was opened last."""
        settle(self._memory)  # the courier's thread uses another stream
        self.courier.give((list(entries), self._memory))

    def finish(self) -> None:
        """Wait until all was sent, and announce the end."""
        for _ in range(NUM_BUCKETS):
            self._take()
        self._meeting.say(str(self._number), entries_to_json([]))

    def _take(self) -> Tensor:
        return self.courier.take("the rollout engines to read on", self._source.timeout_s)

    def _run(self, courier: Courier[Bucket, Tensor]) -> None:
        for _ in range(NUM_BUCKETS):
            courier.bring(_memory(0, self._device))
        group = _group(self._source, self._meeting, self._address, 0)
        while bucket := courier.next():
            entries, memory = bucket
            self._meeting.say(str(self._number), entries_to_json(entries))
            group.broadcast(memory[: entries[-1].end_bytes])
            self._number += 1
            del bucket
            courier.bring(memory)


class _Fetching:
    """A receiver's courier: takes empty buckets and returns them full."""

    def __init__(
        self, source: MeetingSource, meeting: Meeting, address: str, device: torch.device
    ) -> None:
        self._source, self._meeting, self._address = source, meeting, address
        self._device = device

    def run(self, courier: Courier[Tensor, Bucket]) -> None:
        """Receive buckets; runs in the courier's thread."""
        source, number, entries = self._source, 0, None
        group = _group(source, self._meeting, self._address, source.reader + 1)
        while (memory := courier.next()) is not None:
            if entries == []:
                continue  # the group stays until the reader leaves
            what = "the trainer to send weights"
            entries = entries_from_json(self._meeting.wait(str(number), what, source.timeout_s))
            if entries:
                num_bytes = entries[-1].end_bytes
                if memory.numel() < num_bytes:
                    del memory  # free the old one first
                    memory = _memory(num_bytes, self._device)
                group.broadcast(memory[:num_bytes])
            courier.bring((entries, memory))
            number += 1


def _device(source: MeetingSource) -> torch.device:
    """Return the current device of the calling thread; the courier's thread would have another."""
    if source.device_name == "cpu":
        return torch.device("cpu")
    return torch.device(source.device_name, torch.accelerator.current_device_index())


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class CollectiveSource(MeetingSource):
    """Source that reads the broadcast of rank 0."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, valid until the next one."""
        meeting, address = attend(self.host, self.port, self.token, WeightSyncError)
        with meeting.telling(f"rollout engine {self.reader}", "took weights"):
            come(self, meeting)
            for entry, tensor in read_lane(self, meeting, address):
                yield entry.name, tensor


@dataclass(frozen=True)
class CollectiveTransport(MeetingTransport):
    """Transport in which rank 0 broadcasts; a tensor larger than a bucket enlarges the bucket."""

    source_type: ClassVar[type[MeetingSource]] = CollectiveSource

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`; rank 0 sends, the other ranks only iterate and compute the receipt."""
        stream = OutgoingStream(tensors, getattr(torch, self.dtype), self.float32_names)
        if rank() != 0:
            for _ in stream:
                pass
            return stream.sent
        with in_step(tensors):
            self._pass_on(stream)
        return stream.sent

    def _pass_on(self, stream: OutgoingStream) -> None:
        def fill(packer: Packer) -> None:
            for name, tensor in stream:
                packer.add(name, tensor)

        source = self.sources[0]
        meeting, address = attend(source.host, source.port, source.token, ReceiverGoneError)
        with meeting.telling(TRAINER, SENT):
            send_lane(source, meeting, address, self.bucket_bytes, fill)
