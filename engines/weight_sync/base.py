"""The contract of a weight sync: trained weights reach a rollout engine, or nothing is sampled.

Promises of every checkpoint engine: tensors are streamed one at a time, never a second full
copy; each has a checksum on both sides; `send_weights` returns only after the receiver has
confirmed (version, digest); anything else is a `WeightSyncError`, after which the receiver
samples nothing until a sync succeeds.
Not promised: the order of the tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class SyncReport:
    """One successful sync. Reports of ranks that serve the same weights are equal.

    Attributes:
        version: version that the receiver serves now.
        digest: digest of the weights, equal on both sides.
        num_tensors: tensors sent.
        num_bytes: their size in the receiver's dtype.
        seconds: wall time of the whole sync, checksums included.
    """

    version: int
    digest: str
    num_tensors: int
    num_bytes: int
    seconds: float = field(compare=False)


class CheckpointEngine(ABC):
    """Carries weights from the training ranks to the rollout engines."""

    @abstractmethod
    def send_weights(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> SyncReport:
        """Send weights by Hugging Face name and wait until they are served as `version`.

        The training side casts to the receiver's dtype before it computes a checksum.

        Args:
            tensors: (name, full tensor) of every parameter, tied ones once.
            version: number of the weights; every token sampled from them carries it.

        Returns:
            What was sent, once the receiver serves it.

        Raises:
            WeightSyncError: what the receiver holds is not what was sent.
        """
