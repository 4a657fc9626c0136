"""A device of fake memory apart from the host's, which counts what is copied in each direction."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hardware.base import CopyStream
from hardware.cpu import CPUPlatform


@dataclass
class Traffic:
    """Bytes of each copy by stream, and calls in order."""

    copies: list[list[int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.calls.clear()
        for each in self.copies:
            each.clear()


class CountingStream(CopyStream):
    """Copies at once and records it."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic, self._number = traffic, len(traffic.copies)
        traffic.copies.append([])

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
        target.copy_(source)
        self._traffic.copies[self._number].append(source.nbytes)
        self._traffic.calls.append(f"copy {self._number}")

    def join(self) -> None:
        self._traffic.calls.append(f"join {self._number}")

    def synchronize(self) -> None:
        self._traffic.calls.append(f"synchronize {self._number}")


class ApartPlatform(CPUPlatform):
    """The CPU under an index, so that the device is another one than the host.

    Set `is_apart` to False for code that takes no index of a CPU.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.is_apart = True

    @property
    def is_accelerator(self) -> bool:
        return True

    def device(self) -> torch.device:
        return torch.device("cpu", 0) if self.is_apart else super().device()

    def copy_stream(self) -> CopyStream:
        return CountingStream(self.traffic)
