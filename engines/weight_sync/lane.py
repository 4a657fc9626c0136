"""Broadcast of one sender to every reader of a transfer, through a process group of its own.

Two buckets are used in turn: the sender fills one while the other is sent, and a reader takes
tensors out of one while the other arrives. A message ahead of each bucket describes it.
Promises: nothing is sent before every reader has come. Two buckets on each side are all the extra
memory. Checksums are passed on, not verified.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from engines.errors import WeightSyncError
from engines.weight_sync.buckets import Entry, Packer, entries_from_json, entries_to_json
from engines.weight_sync.courier import BroadcastGroup, Courier, settle
from engines.weight_sync.meeting import GRACE_S, Meeting, MeetingSource

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
