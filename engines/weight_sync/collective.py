"""Broadcasts weights from a trainer's ranks to rollout engines on any machine.

The communicator is one process group of all senders and all readers. The next transfer uses it
again, if all processes still hold it. Senders broadcast in turns, in an order that all processes
know. Two buckets are used alternately: a sender fills one while the other is sent, and a reader
takes tensors out of one while the other arrives. A message before each bucket describes it.
Collectives run in a thread of their own, so that a missing process cannot block the caller.
Promises: nothing is sent before every process has come. Extra memory is two buckets on each side,
a third on a sender beside others, and a sender's cast of one tensor. If one side fails or does not
come, the others end with an error that names it, by the deadline. A communicator is not used after
a failure; the thread ends with the collective that is running, at the latest at its timeout.
Does not promise encryption. Checksums of entries are passed on, not verified.
"""

import itertools
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
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
KEY = "bucket {} {}"
"""Key of the message before a bucket: the sending rank, and the number of its bucket."""

Bucket = tuple[list[Entry], Tensor]
Turns = Sequence[tuple[int, int | None]]
"""Sending ranks in order, each with its number of tensors in this turn.

None: an empty message ends the turn, which has to be the last."""
RANK_0_SENDS_ALL: Turns = ((0, None),)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class CollectiveSource(RendezvousSource):
    """Source that reads the broadcast of rank 0."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, valid until the next one."""
        with (
            self.join() as rendezvous,
            receiving(rendezvous, RANK_0_SENDS_ALL) as entries,
        ):
            for entry, tensor in entries:
                yield entry.name, tensor


@dataclass(frozen=True)
class CollectiveTransport(RendezvousTransport):
    """Transport in which rank 0 broadcasts; a tensor larger than a bucket enlarges the bucket."""

    source_type: ClassVar[type[RendezvousSource]] = CollectiveSource

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """See `Transport`; rank 0 sends, the other ranks only compute the digest."""
        stream = CastStream(
            tensors,
            getattr(torch, self.dtype),
            self.float32_names,
            self.sources[0].checksum_method,
        )
        with in_step(stream):
            if rank() == 0:
                with (
                    self.sources[0].join(ReceiverGoneError) as rendezvous,
                    sending(rendezvous, self.bucket_bytes, RANK_0_SENDS_ALL) as packer,
                ):
                    stream.pack(packer)
        return stream.sent


@contextmanager
def sending(rendezvous: Rendezvous, bucket_bytes: int, turns: Turns) -> Iterator[Packer]:
    """Wait for all processes, yield a packer that broadcasts its buckets, wait until all are read.

    Tensors of two turns must not share a bucket.

    Raises:
        ReceiverGoneError: a process gave up.
        DeadlineError: a process did not come, or a reader stopped reading.
    """
    with _joined(rendezvous, turns, rank()) as member:
        sender = _BucketSender(member)
        try:
            packer = Packer(bucket_bytes, sender.open_bucket, sender.publish)
            yield packer
            packer.flush()
            sender.finish()
            if member.number == 0:
                rendezvous.await_readers("taken", "read on")
                rendezvous.say(ALL_TAKEN)
            else:
                rendezvous.wait(ALL_TAKEN, "every rollout engine to read on", member.patience_s)
        finally:
            sender.thread.put(None)
        sender.thread.join(member.patience_s)


@contextmanager
def receiving(rendezvous: Rendezvous, turns: Turns) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """Yield the (entry, tensor) pairs of all turns, after all processes came.

    A tensor is a view of a bucket, valid until the next one. The pairs must be read to the end.

    Raises:
        WeightSyncError: a process gave up.
        DeadlineError: a process did not come, or nothing arrived.
    """
    source = rendezvous.source
    with _joined(rendezvous, turns, None) as member:
        thread = CollectiveThread[Tensor, Bucket](rendezvous, member.fetch)
        try:
            for _ in range(NUM_BUCKETS):
                thread.put(_memory(0, member.device))
            yield _entries(thread, source.timeout_s)
            rendezvous.say(f"taken {source.reader}")
            # A reader that ended before the others are done would break their connections.
            rendezvous.wait(
                ALL_TAKEN, "every rollout engine to take the weights", member.patience_s
            )
        finally:
            thread.put(None)
        thread.join(member.patience_s)


def close_communicators() -> None:
    """Free the communicators that this process keeps."""
    _kept.clear()


@contextmanager
def _joined(rendezvous: Rendezvous, turns: Turns, sender: int | None) -> Iterator["_Member"]:
    """Wait for all processes and agree on a communicator; forget it if the block fails.

    `sender` is this process's rank if it sends, None if it reads.
    """
    source, senders = rendezvous.source, _senders(turns)
    number = len(senders) + source.reader if sender is None else senders.index(sender)
    seat = (source.host, source.port, number)
    held = _kept[seat][0] if seat in _kept else ""
    if number == 0:
        agreed = _agreed(rendezvous, len(senders), held)
    else:
        rendezvous.say(f"communicator {number}", held)
        if sender is None:
            rendezvous.announce()
        # The first sender waits less long, so its error names the process that did not come.
        agreed = rendezvous.wait(
            ALL_CAME, "every rollout engine to connect", source.timeout_s + GRACE_S
        )
    with ExitStack() as failed:
        failed.callback(_kept.pop, seat, None)
        yield _Member(rendezvous, turns, number, _device(source), agreed)
        failed.pop_all()


def _agreed(rendezvous: Rendezvous, num_senders: int, held: str) -> str:
    """Wait for all processes; return the communicator that each holds, or the name of a new one."""
    source = rendezvous.source
    size = num_senders + source.num_readers
    rendezvous.await_readers("reader", "come")
    theirs = {
        rendezvous.wait(f"communicator {number}", f"sender {number} to come", source.timeout_s)
        for number in range(1, size)
    }
    if theirs != {held} or not held.startswith(f"{size}-"):
        held = f"{size}-{secrets.token_hex(8)}"
    rendezvous.say(ALL_CAME, held)
    return held


def _senders(turns: Turns) -> list[int]:
    return sorted({sender for sender, _ in turns})


@dataclass(frozen=True)
class _Member:
    """A process's part in a transfer: `number` in the communicator `agreed`.

    The senders have the first numbers, in the order of their ranks, then come the readers.
    """

    rendezvous: Rendezvous
    turns: Turns
    number: int
    device: torch.device
    agreed: str

    @property
    def patience_s(self) -> float:
        """Deadline of what has to end after the first sender, whose error names the cause."""
        return self.rendezvous.source.timeout_s + GRACE_S

    def communicator(self) -> "BroadcastGroup":
        """Return the kept communicator, or make it together with the other members."""
        source = self.rendezvous.source
        seat = (source.host, source.port, self.number)
        if seat not in _kept or _kept[seat][0] != self.agreed:
            _kept.pop(seat, None)  # freed first
            group = BroadcastGroup(
                source.backend,
                PrefixStore(self.agreed, self.rendezvous.store),
                self.number,
                len(_senders(self.turns)) + source.num_readers,
                self.rendezvous.address,
                self.patience_s,
            )
            _kept[seat] = self.agreed, group
        return _kept[seat][1]

    def fetch(self, free: Iterator[Tensor]) -> Iterator[Bucket]:
        """Yield each free bucket once it is filled, the last without entries; runs in a thread."""
        group = self.communicator()
        numbers = {sender: itertools.count() for sender, _ in self.turns}
        for sender, num_tensors in self.turns:
            yield from self.take(group, sender, num_tensors, numbers[sender], free)
        yield [], _memory(0, self.device)

    def take(
        self,
        group: "BroadcastGroup",
        sender: int,
        num_tensors: int | None,
        numbers: Iterator[int],
        free: Iterator[Tensor],
    ) -> Iterator[Bucket]:
        """Yield each free bucket once another process filled it, until its turn is over."""
        root = _senders(self.turns).index(sender)
        num_left = num_tensors
        while num_left is None or num_left > 0:
            memory = next(free, None)
            if memory is None:
                return
            key, timeout_s = KEY.format(sender, next(numbers)), self.rendezvous.source.timeout_s
            entries = entries_from_json(self.rendezvous.wait(key, WEIGHTS_TO_COME, timeout_s))
            if not entries:
                return
            num_bytes = entries[-1].end_bytes
            if memory.numel() < num_bytes:
                del memory  # free the old one first
                memory = _memory(num_bytes, self.device)
            group.broadcast(memory[:num_bytes], root)
            yield entries, memory
            if num_left is not None:
                num_left -= len(entries)


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

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread; raises as `get`."""
        wait([self._ended], timeout_s)
        if not self._ended.done():
            raise DeadlineError("the last broadcast to end", timeout_s)
        if self._ended.exception() is not None:
            self._raise_failure()

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

    def __init__(self, member: _Member) -> None:
        self._member, self._device = member, member.device
        self._sender = _senders(member.turns)[member.number]
        self._numbers = {sender: itertools.count() for sender, _ in member.turns}
        self._memory = _memory(0, self._device)
        self.thread = CollectiveThread[Bucket, Tensor](member.rendezvous, self._broadcast)

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
        """Wait until all was sent, and announce the end if the readers do not know it."""
        for _ in range(NUM_BUCKETS):
            self._free_bucket()
        if (self._sender, None) in self._member.turns:
            self._announce([])

    def _announce(self, entries: Sequence[Entry]) -> None:
        key = KEY.format(self._sender, next(self._numbers[self._sender]))
        self._member.rendezvous.say(key, entries_to_json(entries))

    def _free_bucket(self) -> Tensor:
        timeout_s = self._member.rendezvous.source.timeout_s
        return self.thread.get("the rollout engines to read on", timeout_s)

    def _broadcast(self, filled: Iterator[Bucket]) -> Iterator[Tensor]:
        """Yield empty buckets, then each bucket once it was sent; runs in the thread."""
        for _ in range(NUM_BUCKETS):
            yield _memory(0, self._device)
        member = self._member
        group = member.communicator()
        spare = deque([_memory(0, self._device)])
        for sender, num_tensors in member.turns:
            if sender == self._sender:
                yield from self._send(group, num_tensors, filled)
                continue
            of_other = iter(spare.popleft, None)
            numbers = self._numbers[sender]
            for _, memory in member.take(group, sender, num_tensors, numbers, of_other):
                spare.append(memory)

    def _send(
        self, group: "BroadcastGroup", num_tensors: int | None, filled: Iterator[Bucket]
    ) -> Iterator[Tensor]:
        """Yield each bucket of a turn once it was sent.

        A bucket is announced right before its broadcast: no reader waits for one that never comes.
        """
        num_left = num_tensors
        while num_left is None or num_left > 0:
            bucket = next(filled, None)
            if bucket is None:
                return
            entries, memory = bucket
            self._announce(entries)
            group.broadcast(memory[: entries[-1].end_bytes], self._member.number)
            yield memory
            del bucket, memory
            if num_left is not None:
                num_left -= len(entries)


def _entries(
    thread: CollectiveThread[Tensor, Bucket], timeout_s: float
) -> Iterator[tuple[Entry, Tensor]]:
    while (bucket := thread.get(WEIGHTS_TO_COME, timeout_s))[0]:
        entries, memory = bucket
        for entry in entries:
            yield entry, entry.view(memory)
        thread.put(memory)
        del bucket, memory


def _device(source: RendezvousSource) -> torch.device:
    """Return the current device of the calling thread; the collective thread has another."""
    if source.device_name == "cpu":
        return torch.device("cpu")
    return torch.device(source.device_name, torch.accelerator.current_device_index())


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class BroadcastGroup:
    """Process group for broadcasts; independent of the default process group.

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

    def broadcast(self, memory: Tensor, root: int = 0) -> None:
        """Broadcast bytes of process `root` into memory of equal size elsewhere, until done."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([memory], options).wait()
        settle(memory)  # on a device `wait` blocks only the stream


_kept: dict[tuple[str, int, int], tuple[str, BroadcastGroup]] = {}
"""Communicators with their names, by store and number of this process in them."""
