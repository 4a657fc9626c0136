"""Every question about a device has one answer: its platform.

Nothing outside `hardware/` branches on a device's name. Torch is imported by the platforms'
own files when a method needs it, so platforms can be listed and named without it.
To add one: a subclass (of `AcceleratorPlatform` where torch has a module for the device) and a
name for it, see `docs/guides/add-a-platform.md`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Availability:
    """Whether a platform can be used here, and why (not)."""

    ok: bool
    reason: str


class PlatformBase(ABC):
    """One kind of accelerator, or the CPU.

    Attributes:
        name: of its row in the table of platforms; set by whoever makes it.
        device_name: torch's device type (`cpu`, `cuda`, `npu`, ...).
        vendor_name: who makes it; two vendors may share a device type.
        communication_backend: torch.distributed backend of its devices' collectives.
        visible_devices_env: environment variable that limits what a process sees; None has none.
        ray_resource: Ray's name of the resource.
        ray_noset_env: environment variable that, set to 1, keeps Ray from writing
            `visible_devices_env` in its workers. None: Ray never writes it, so every rank sees
            all devices and has to choose its own with `set_device`.
        supports_ipc: whether two processes can share one device allocation.
    """

    name: str = ""
    device_name: str
    vendor_name: str
    communication_backend: str
    visible_devices_env: str | None
    ray_resource: str
    ray_noset_env: str | None
    supports_ipc: bool

    @property
    def process_group_backend(self) -> str:
        """What `torch.distributed.init_process_group` is told.

        Tensors on the host have collectives too: shards that were offloaded are gathered there.
        """
        if self.device_name == "cpu":
            return self.communication_backend
        return f"cpu:gloo,{self.device_name}:{self.communication_backend}"

    @property
    def is_assigned_by_ray(self) -> bool:
        """Whether Ray gives each process a device of its own; CPUs it only counts."""
        return self.ray_resource != "CPU"

    @property
    def shows_all_devices(self) -> bool:
        """Whether a process that Ray gave a device sees those of its whole node."""
        return self.is_assigned_by_ray and self.ray_noset_env is None

    @abstractmethod
    def is_available(self) -> Availability:
        """Whether a device of this platform can be used by this process.

        Starts no process, allocates nothing on a device, imports no vendor package that is not
        installed, and does not raise: the reason is what the user reads.
        """

    @abstractmethod
    def device_count(self) -> int:
        """Devices this process can see."""

    @abstractmethod
    def device(self) -> "torch.device":
        """The device that this process computes on."""

    @abstractmethod
    def device_label(self) -> str:
        """Product name of that device; an accelerator may have to be opened to tell."""

    @abstractmethod
    def device_uuid(self) -> str | None:
        """What identifies that device on its host, whatever its index; None where nothing does."""

    @abstractmethod
    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Dense peak of that device, the denominator of a model FLOPs utilisation.

        Args:
            dtype: name of torch's dtype of the operands (`bfloat16`, `float16`, `float32`).

        Returns:
            Floating-point operations per second without sparsity; None if unknown.
        """

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Choose the device of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything queued so far."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed every random generator that tensor operations may draw from."""

    @abstractmethod
    def rng_state(self) -> "Mapping[str, torch.Tensor]":
        """State of those generators: name to uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Undo to `rng_state`; names that the platform does not know are ignored."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return unused device memory to the system."""

    @abstractmethod
    def memory_allocated_bytes(self) -> int:
        """Memory in use now: by tensors on an accelerator, by the process on a CPU."""

    @abstractmethod
    def max_memory_allocated_bytes(self) -> int:
        """The largest value of `memory_allocated_bytes` since the process started."""

    @abstractmethod
    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """Keyword arguments of a Ray actor or task that needs so many devices."""

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment variables that a rollout engine's process needs on this platform."""
        return {}

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Mark a span of work for torch's profiler, which vendors' profilers plug into."""
        import torch

        return torch.profiler.record_function(name)

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Scope in which a training library that expects another device runs on this one.

        Args:
            library: top-level name of the library (`megatron`).

        Returns:
            To be entered before the library is first imported, and left when its engine is gone.

        Raises:
            ConfigError: this device needs another package for that library, and it is missing.
        """
        return nullcontext()
