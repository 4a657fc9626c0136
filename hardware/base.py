"""Interface of a platform; other code tells at most the CPU from accelerators.

Platforms import torch inside methods, so they can be listed without it. To add one, see
`docs/guides/add-a-platform.md`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hardware.ipc_memory import IpcMemory
    from infra.survey_report import DeviceFacts


GraphCapture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records the kernels that a function launches, which do not run; returns their launch as a whole.

A launch has the addresses and sizes of the recording, so tensors made outside of the function must
stay in place. The function must not wait for the device. Launches of one `GraphCapture` share the
memory of intermediate results and run one after the other. Their memory is given back by
`empty_cache` when all of them are dropped; then a new `GraphCapture` is needed.
"""


@dataclass(frozen=True)
class Availability:
    """Result of probing a platform: `ok` if it can be used here, and the reason either way."""

    ok: bool
    reason: str


class CopyStream(ABC):
    """Copies between device and host that run beside the computation."""

    @abstractmethod
    def copy(self, source: "torch.Tensor", target: "torch.Tensor") -> None:
        """Queue a copy behind what the device computes so far; one side is pinned host memory.

        The tensor on the device may be dropped before the copy has run.
        """

    @abstractmethod
    def join(self) -> None:
        """Have the device compute what is queued from now on after the copies queued so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all copies are done, so that the host may read them."""


class PlatformBase(ABC):
    """One kind of accelerator, or the CPU.

    Attributes:
        name: name in the table of platforms; set by the code that creates the platform.
        device_name: torch device type (`cpu`, `cuda`, `npu`, ...); vendors may share one.
        visible_devices_env: environment variable that limits the visible devices, if there is one.
        ray_noset_env: environment variable that, set to 1, keeps Ray from writing
            `visible_devices_env` in its workers. None: Ray never writes it, so every rank sees
            all devices and chooses its own with `set_device`.
        supports_ipc: True if two processes can share one device allocation, by `ipc_memory`.
    """

    name: str = ""
    device_name: str
    vendor_name: str
    communication_backend: str
    visible_devices_env: str | None = None
    ray_resource: str
    ray_noset_env: str | None = None
    supports_ipc: bool = False

    @property
    def process_group_backend(self) -> str:
        """Backend of the default process group; gloo for host tensors, such as offloaded shards."""
        if self.device_name == "cpu":
            return self.communication_backend
        return f"cpu:gloo,{self.device_name}:{self.communication_backend}"

    @property
    def is_accelerator(self) -> bool:
        """True if the device is not the host's processor."""
        return self.device_name != "cpu"

    @property
    def is_assigned_by_ray(self) -> bool:
        """True if Ray assigns each process its devices; False for CPUs, which it only counts."""
        return self.ray_resource != "CPU"

    @property
    def shows_all_devices(self) -> bool:
        """True if a process to which Ray assigned a device sees all devices of its node."""
        return self.is_assigned_by_ray and self.ray_noset_env is None

    @abstractmethod
    def is_available(self) -> Availability:
        """Return whether this process can use a device of this platform, and why.

        Must not raise, start a process, allocate on a device, or import a package not installed.
        """

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of devices visible to this process."""

    @abstractmethod
    def device(self) -> "torch.device":
        """Return the device that this process computes on."""

    @abstractmethod
    def device_label(self) -> str:
        """Return the product name of this process's device; may open it."""

    def device_facts(self) -> "DeviceFacts | None":
        """Return driver, libraries and devices, which it opens; None for a CPU."""
        return None

    @abstractmethod
    def device_uuid(self) -> str | None:
        """Return an identifier of this process's device, independent of its index, or None."""

    @abstractmethod
    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for operands of a torch dtype name; None if unknown."""

    def supports_fp8(self) -> bool:
        """Return True if this process's device, which it opens, multiplies 8-bit floats (E4M3)."""
        return False

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Choose the device of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed every random generator that tensor operations may use."""

    @abstractmethod
    def rng_state(self) -> "Mapping[str, torch.Tensor]":
        """Return the state of the generators of `manual_seed`: name to uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Restore the result of `rng_state`; names unknown to the platform are ignored."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return unused device memory to the system."""

    def total_memory_bytes(self) -> int | None:
        """Return the memory of this process's device; None if it has none of its own. Opens it."""
        return None

    @abstractmethod
    def memory_allocated_bytes(self) -> int:
        """Return the memory in use: by tensors on an accelerator, by the process on a CPU."""

    @abstractmethod
    def max_memory_allocated_bytes(self) -> int:
        """Return the largest `memory_allocated_bytes` since the process started."""

    def free_memory_bytes(self) -> int | None:
        """Return the device memory that this process could allocate; None if it is not limited."""
        return None

    @abstractmethod
    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """Return keyword arguments of a Ray actor or task that needs `num_devices` devices."""

    def copy_stream(self) -> CopyStream | None:
        """Return a new stream for copies; None: the device has no memory apart from the host's."""
        return None

    def graph_capture(self, device: "torch.device") -> GraphCapture | None:
        """Return a recorder for work on `device`, for any thread; None: kernels run one by one."""
        return None

    def ipc_memory(self) -> "IpcMemory":
        """Return access to shareable memory of this process's device; RuntimeError without it."""
        raise RuntimeError(f"processes cannot share the memory of {self.vendor_name} devices")

    def choose_attention(self) -> str:
        """Let torch use the fastest kernels of packed attention in this process; name them."""
        return "torch's own kernels"

    def rollout_env_vars(self) -> dict[str, str]:
        """Return environment variables that a rollout engine's process needs on this platform."""
        return {}

    def training_env_vars(self, library: str) -> dict[str, str]:
        """Return environment variables that a training rank needs before it opens its device.

        Args:
            library: backend that trains; `megatron` orders its kernels by launch.
        """
        return {}

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Mark a span of work for torch's profiler; vendors override it with their own markers."""
        import torch

        return torch.profiler.record_function(name)

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Return a scope to import and run a library (`megatron`, `torchtitan`) on this device.

        Raises:
            ConfigError: this device needs a package for that library that is not installed.
        """
        return nullcontext()
