"""What passes between a sender and a receiver of weights.

Promises of every sync: tensors are streamed, never a second full copy; each has a checksum on
both sides; a `SyncReport` exists only after every receiver has confirmed (version, digest);
anything else is a `WeightSyncError`, after which the receiver samples nothing until a sync
succeeds.
Not promised: the order of the tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Weights on their way to one receiver.

    One that is read in another process is plain data, so that it travels there.
    """

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, once.

        Yields:
            (Hugging Face name, full tensor) of every parameter, tied ones once, in the
            receiver's dtype. A tensor may be overwritten when the next one is asked for.

        Raises:
            WeightSyncError: the sender failed, or nothing came before the deadline.
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
