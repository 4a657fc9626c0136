"""Interfaces and data types of the weight sync from a trainer to its rollout engines.

Promises of every sync: tensors are streamed, never a second full copy, but for what delta sync
keeps in host memory. Each tensor has a checksum on both sides. A `SyncReport` exists only after
every receiver that is not lost has confirmed version and digest; else an error is raised, and the
receiver samples nothing until a sync succeeds.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, Self

from torch import Tensor

from engines.checksum import ChecksumMethod, TensorChecksums
from engines.errors import WeightSyncError


class WeightSource(Protocol):
    """Source from which a receiver reads weights; plain data if it is read in another process."""

    @property
    @abstractmethod
    def checksum_method(self) -> ChecksumMethod:
        """Method of the sender's checksums, with which a receiver has to compute its own."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) of every parameter and persistent buffer.

        Order is free; tied weights come once. The dtype is the receiver's, or float32 for
        `hub_names.served_float32_names`. A tensor may be overwritten when the next is requested.
        Raises `WeightSyncError` if the sender failed, `DeadlineError` if nothing came in time.
        """

    @abstractmethod
    def of_worker(self, worker: int) -> "WeightSource":
        """Return the source for worker number `worker`, from 0, of this receiver."""


@dataclass(frozen=True)
class WeightDigest:
    """Digest and size of weights sent or received; `digest` is by `engines.checksum.combine`."""

    digest: str
    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, checksums: TensorChecksums) -> Self:
        """Return the digest of checked tensors; waits for devices."""
        return cls(checksums.digest(), len(checksums.by_name()), checksums.num_bytes)


def first_of_each(num_workers: Sequence[int]) -> list[int]:
    """Return the number of each receiver's first worker; workers are counted across receivers."""
    return list(accumulate(num_workers, initial=0))[:-1]


class ReceiverGoneError(WeightSyncError):
    """A receiver ended before it had all weights; the receiver's own error has the reason."""


class Delivery(Protocol):
    """The transfer of one set of weights to every receiver."""

    @property
    @abstractmethod
    def sources(self) -> Sequence[WeightSource]:
        """One source per receiver, for its worker 0; `WeightSource.of_worker` is for the others."""

    @abstractmethod
    def stop(self) -> None:
        """Stop sending and free everything; callable from any thread, and repeatedly."""


class Transport(Delivery, Protocol):
    """A delivery whose sender has every weight as a full tensor."""

    @abstractmethod
    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> WeightDigest:
        """Send (name, full tensor) pairs in the trainer's thread; called on each rank with weights.

        Raises:
            ReceiverGoneError: a receiver gave up.
            DeadlineError: a receiver did not come, or stopped reading.
        """


@dataclass(frozen=True)
class SyncReport:
    """One successful sync to `version`; reports of ranks that serve the same weights are equal."""

    version: int
    sent: WeightDigest
    seconds: float = field(compare=False)


def __getattr__(name: str) -> Any:
    if name != "Receipt":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.Receipt is now WeightDigest", DeprecationWarning, stacklevel=2)
    return WeightDigest
