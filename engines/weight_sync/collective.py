"""Weights from a trainer to rollout engines on any machine, broadcast by the rank that has all.

Promises: those of `lane`; whichever side fails, stays away or is stopped, the others end with an
error that names it, by the deadline.
Does not promise that what passes is hidden from others on that network.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engines.collectives import rank
from engines.errors import WeightSyncError
from engines.weight_sync.base import Receipt, ReceiverGoneError
from engines.weight_sync.buckets import Packer
from engines.weight_sync.lane import come, read_lane, send_lane
from engines.weight_sync.meeting import SENT, TRAINER, MeetingSource, MeetingTransport, attend
from engines.weight_sync.outgoing import OutgoingStream, in_step


@dataclass(frozen=True)
class CollectiveSource(MeetingSource):
    """See `MeetingSource`."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`; a tensor is a view of a bucket, overwritten once it was left."""
        meeting, address = attend(self.host, self.port, self.token, WeightSyncError)
        with meeting.telling(f"rollout engine {self.reader}", "took weights"):
            come(self, meeting)
            for entry, tensor in read_lane(self, meeting, address):
                yield entry.name, tensor


@dataclass(frozen=True)
class CollectiveTransport(MeetingTransport):
    """See `Transport` and `MeetingTransport`; a tensor above a bucket makes that as large."""

    source_type: ClassVar[type[MeetingSource]] = CollectiveSource

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> Receipt:
        """See `Transport`. Every rank counts what it holds, rank 0 passes it on."""
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
