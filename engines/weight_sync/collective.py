"""Weights from a trainer to rollout engines on any machine, broadcast by a rank with full tensors.

Promises: those of `lane`. If one side fails or does not come, the others end with an error that
names it, by the deadline. The traffic is not encrypted.
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

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> Receipt:
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
