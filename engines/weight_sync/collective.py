"""Broadcasts weights from a trainer's ranks to rollout engines on any machine.

Senders broadcast in turns, in an order that all processes know. Two buckets are used alternately: a
sender fills one while the other is sent, and a reader takes tensors out of one while the other
arrives. A message before each bucket describes it.
Promises: those of `communicator`; extra memory is two buckets on each side, a third on a sender
beside others, and a sender's cast of one tensor; delta sync takes more, see `delta`.
Does not promise encryption. Checksums of entries are passed on, not verified.
"""

import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

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
from engines.weight_sync.communicator import (
    BroadcastGroup,
    CollectiveThread,
    Member,
    Turns,
    joined,
    senders_of,
)
from engines.weight_sync.delta import Sizes, num_bytes_sent
from engines.weight_sync.rendezvous import Rendezvous, RendezvousSource, RendezvousTransport

NUM_BUCKETS = 2
ALL_TAKEN = "all taken"
WEIGHTS_TO_COME = "the trainer to send weights"
KEY = "bucket {} {}"
"""Key of the message before a bucket: the sending rank, and the number of its bucket."""

Bucket = tuple[list[Entry], Tensor]
RANK_0_SENDS_ALL: Turns = ((0, None),)


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
    with joined(rendezvous, turns, rank()) as member:
        sender = _BucketSender(member)
        try:
            packer = Packer(bucket_bytes, sender.open_bucket, sender.publish)
            yield packer
            packer.flush()
            sender.finish()
            member.finish()
            if member.number == 0:
                taken = rendezvous.await_readers("taken", "read on")
                for rebuilt in taken:
                    member.confirm(rebuilt)
                rendezvous.say(ALL_TAKEN, taken[0])
            else:
                member.confirm(
                    rendezvous.wait(ALL_TAKEN, "every rollout engine to read on", member.patience_s)
                )
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
    with joined(rendezvous, turns, None) as member:
        thread = CollectiveThread[Tensor, Bucket](rendezvous, partial(_fetch, member))
        try:
            for _ in range(NUM_BUCKETS):
                thread.put(_memory(0, member.device))
            yield _entries(thread, source.timeout_s)
            rendezvous.say(f"taken {source.reader}", member.finish())
            # A reader that ended before the others are done would break their connections.
            rebuilt = rendezvous.wait(
                ALL_TAKEN, "every rollout engine to take the weights", member.patience_s
            )
            member.confirm(rebuilt)
        finally:
            thread.put(None)
        thread.join(member.patience_s)


class _BucketSender:
    """The sender's buckets; a thread broadcasts one while the other is filled."""

    def __init__(self, member: Member) -> None:
        self._member, self._device = member, member.device
        self._sender = senders_of(member.turns)[member.number]
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
            self._announce([], None)

    def _announce(self, entries: Sequence[Entry], sizes: Sizes | None) -> None:
        key = KEY.format(self._sender, next(self._numbers[self._sender]))
        self._member.rendezvous.say(key, json.dumps([entries_to_json(entries), sizes]))

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
            for _, memory in _take(member, group, sender, num_tensors, numbers, of_other):
                spare.append(memory)

    def _send(
        self, group: BroadcastGroup, num_tensors: int | None, filled: Iterator[Bucket]
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
            parts, sizes = memory[: entries[-1].end_bytes], None
            if self._member.bases is not None:
                parts, sizes = self._member.bases.encode(self._sender, parts)
            self._announce(entries, sizes)
            group.broadcast(parts, self._member.number)
            yield memory
            del bucket, memory, parts
            if num_left is not None:
                num_left -= len(entries)


def _fetch(member: Member, free: Iterator[Tensor]) -> Iterator[Bucket]:
    """Yield each free bucket once it is filled, the last without entries; runs in a thread."""
    group = member.communicator()
    numbers = {sender: itertools.count() for sender, _ in member.turns}
    for sender, num_tensors in member.turns:
        yield from _take(member, group, sender, num_tensors, numbers[sender], free)
    yield [], _memory(0, member.device)


def _take(
    member: Member,
    group: BroadcastGroup,
    sender: int,
    num_tensors: int | None,
    numbers: Iterator[int],
    free: Iterator[Tensor],
) -> Iterator[Bucket]:
    """Yield each free bucket once another process filled it, until its turn is over."""
    root = senders_of(member.turns).index(sender)
    num_left = num_tensors
    while num_left is None or num_left > 0:
        memory = next(free, None)
        if memory is None:
            return
        key, timeout_s = KEY.format(sender, next(numbers)), member.rendezvous.source.timeout_s
        text, sizes = json.loads(member.rendezvous.wait(key, WEIGHTS_TO_COME, timeout_s))
        entries = entries_from_json(text)
        if not entries:
            return
        num_bytes = entries[-1].end_bytes
        if memory.numel() < num_bytes:
            del memory  # free the old one first
            memory = _memory(num_bytes, member.device)
        parts = memory[:num_bytes]
        if sizes is not None:
            parts = _memory(num_bytes_sent(num_bytes, sizes), member.device)
        group.broadcast(parts, root)
        is_reader = member.number >= len(senders_of(member.turns))
        if member.bases is not None and is_reader:
            member.bases.rebuild(sender, parts, sizes, memory[:num_bytes])
            settle(memory)
        del parts
        yield entries, memory
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


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
