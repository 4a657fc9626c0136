"""A CPU that records and replays work as a device with graphs does, and checks what that relies on.

A graph repeats the kernels of its recording with their sizes, numbers and addresses, whatever the
Python code would do by then. So each launch runs the Python code again, and has to find the same
operators, with the same numbers, on the same memory. What would make the host wait, or copy from
it, fails as it does while a stream is captured.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hardware.base import GraphCapture
from hardware.cpu import CPUPlatform

UNRECORDABLE = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique",
    "lift_fresh", "resolve_conj", "resolve_neg", "repeat_interleave.Tensor",
)  # fmt: skip
"""Operators of values that the host reads or makes, `tolist` and `torch.tensor` among them."""


class StaleRecordingError(AssertionError):
    """A graph would compute something else than the Python code does."""


class _Trace(TorchDispatchMode):
    """Writes down each operator, and where its tensors lie."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []
        """Results, so that no address is given to another tensor while the trace runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.removesuffix(".default") in UNRECORDABLE:
            raise StaleRecordingError(f"{name} cannot be recorded: the host takes part")
        before = self._described([args, kwargs or {}])
        known = {_storage(tensor) for tensor in _tensors([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._kept.append(tensor)
            if _storage(tensor) not in known:
                self._made.setdefault(_storage(tensor), len(self.calls))
        self.calls.append((name, before))
        return result

    def _described(self, value: object) -> object:
        if isinstance(value, Tensor):
            address = _storage(value)
            place = f"from {self._made[address]}" if address in self._made else f"at {address:#x}"
            return (
                place, value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
            )  # fmt: skip
        if isinstance(value, Mapping):
            return tuple((name, self._described(each)) for name, each in value.items())
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(self._described(each) for each in value)
        return value


@dataclass(eq=False)
class _Launch:
    work: Callable[[], None]
    platform: "RecordingCPU"
    calls: list[tuple[object, ...]] | None = None

    def __call__(self) -> None:
        self.platform.num_launches += 1
        with _Trace() as trace:
            self.work()
        if self.calls is None:
            self.calls = trace.calls
        for at, (recorded, wanted) in enumerate(zip(self.calls, trace.calls, strict=False)):
            if recorded != wanted:
                raise StaleRecordingError(f"operator {at}: recorded {recorded}, want {wanted}")
        if len(self.calls) != len(trace.calls):
            raise StaleRecordingError(f"{len(self.calls)} operators, want {len(trace.calls)}")


@dataclass
class RecordingCPU(CPUPlatform):
    """Makes a recording at its first launch, and compares the later ones with it.

    Attributes:
        num_lacking: recordings that still run out of memory.
        num_recorded, num_launches: recordings made, and launches of all of them.
    """

    num_lacking: int = 0
    num_recorded: int = 0
    num_launches: int = 0
    _held: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)

    @property
    def num_held(self) -> int:
        """Recordings that somebody could still launch."""
        return len(self._held)

    def graph_capture(self, device: torch.device) -> GraphCapture:
        """Return a recorder; it checks that no other device is asked for."""
        assert device == self.device()
        return self._capture

    def _capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.num_lacking:
            self.num_lacking -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.num_recorded += 1
        launch = _Launch(work, self)
        self._held.add(launch)
        return launch


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return _tensors(list(value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
