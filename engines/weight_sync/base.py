"""What passes between a sender and a receiver of weights.

Promises of every sync: tensors are streamed, never a second full copy; each has a checksum on
both sides; a `SyncReport` exists only after every receiver has confirmed (version, digest);
anything else is a `WeightSyncError`, after which the receiver samples nothing until a sync
succeeds.
Not promised: the order of the tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from engines.errors import WeightSyncError


class WeightSource(Protocol):
    """Weights on their way to one receiver.

    One that is read in another process is plain data, so that it travels there.
    """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, once.

        Returns:
            (Hugging Face name, full tensor) of every parameter and persistent buffer, tied ones
            once, in the dtype that the receiver holds it in: its own, or float32 where the
            architecture keeps it (`hub_names.served_float32_names`). A tensor may be overwritten
            when the next one is asked for.

        Raises:
            WeightSyncError: the sender failed, or nothing came before the deadline.
        """
        ...

    def of_worker(self, worker: int) -> "WeightSource":
        """The same weights for one of the workers that share a receiver's model.

        Args:
            worker: number of it, from 0 on; each reads a source of its own.

        Returns:
            A source; worker 0 may read this one.
        """
        ...


@dataclass(frozen=True)
class Receipt:
    """What a receiver holds, computed from its own memory where it can be read there.

    Attributes:
        digest: `engines.checksum.combine` of its tensors.
        num_tensors: how many they are.
        num_bytes: their size.
    """

    digest: str
    num_tensors: int
    num_bytes: int


def first_of_each(num_workers: Sequence[int]) -> list[int]:
    """Number of each receiver's first worker, where the workers of all are counted in a row."""
    return list(accumulate(num_workers, initial=0))[:-1]


class ReceiverGoneError(WeightSyncError):
    """A receiver ended before it had everything; its own error says why."""


class Delivery(Protocol):
    """One set of weights on its way to every receiver."""

    @property
    def sources(self) -> Sequence[WeightSource]:
        """One per receiver; see `WeightSource.of_worker` for one that is several workers."""
        ...

    def stop(self) -> None:
        """End the sending if it runs, and free everything; from any thread, harmless repeated."""
        ...


class Transport(Delivery, Protocol):
    """A delivery whose sender has every weight whole."""

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> Receipt:
        """Pass everything on, in the thread of the trainer; on each rank that holds the weights.

        Args:
            tensors: (name, full tensor) of every parameter and persistent buffer, tied ones
                once.

        Returns:
            What was sent.

        Raises:
            ReceiverGoneError: a receiver gave up.
            DeadlineError: a receiver did not come, or stopped reading.
        """
        ...


@dataclass(frozen=True)
class SyncReport:
    """One successful sync. Reports of ranks that serve the same weights are equal.

    Attributes:
        version: version that the receivers serve now.
        sent: what was sent, and is held by each of them.
        seconds: wall time of the whole sync, checksums included.
    """

    version: int
    sent: Receipt
    seconds: float = field(compare=False)
