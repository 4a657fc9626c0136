"""Weights in a safetensors file, which the writer keeps until the receivers are done."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.errors import WeightSyncError


@dataclass(frozen=True)
class SafetensorsSource:
    """Source that reads one safetensors file with every weight in the receiver's dtype."""

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
        """See `WeightSource`; any number of workers may read the file."""
        return self
