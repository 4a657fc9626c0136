"""Weights that lie in a safetensors file, for a receiver that reads it in its own process.

Promises: one tensor in memory at a time; the header is read before anything is yielded.
Does not promise that the file stays: whoever wrote it keeps it until the receivers are done.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.errors import WeightSyncError


@dataclass(frozen=True)
class SafetensorsSource:
    """See `WeightSource`.

    Attributes:
        path: one safetensors file with every parameter in the receiver's dtype.
    """

    path: Path

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`."""
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping: it has nothing but `keys`
                    yield name, file.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise WeightSyncError(f"{self.path}: {error}") from error

    def of_worker(self, worker: int) -> "SafetensorsSource":
        """See `WeightSource`; any number may read the file."""
        return self
