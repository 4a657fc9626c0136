"""NVIDIA GPUs through CUDA and NCCL.

A torch built for another vendor's CUDA lookalike (ROCm) is not this platform.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hardware.base import Availability, PlatformBase

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class NvidiaPlatform(PlatformBase):
    """CUDA devices; one per process, chosen with `set_device`."""

    device_name = "cuda"
    vendor_name = "nvidia"
    communication_backend = "nccl"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    supports_ipc = True
    default_dtype = "bfloat16"

    def is_available(self) -> Availability:
        """Whether torch was built for CUDA and finds a driver with a device."""
        import torch

        if torch.version.cuda is None:
            return Availability(False, f"torch built for {torch.version.hip and 'rocm' or 'cpu'}")
        if not torch.cuda.is_available():
            return Availability(
                False, f"torch built for CUDA {torch.version.cuda}, but no driver or no device"
            )
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Availability(True, f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")

    def device_count(self) -> int:
        """CUDA devices this process can see."""
        import torch

        return torch.cuda.device_count()

    def device(self) -> "torch.device":
        """The current CUDA device."""
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        """Make this the current CUDA device."""
        import torch

        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        import torch

        torch.cuda.synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator and that of every CUDA device."""
        import torch

        torch.manual_seed(seed)

    def rng_state(self) -> "Mapping[str, Tensor]":
        """The CPU generator as `cpu`, the current device's as `cuda`."""
        import torch

        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}

    def set_rng_state(self, state: "Mapping[str, Tensor]") -> None:
        """Restore the generators that the state names."""
        import torch

        if "cpu" in state:
            torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        import torch

        torch.cuda.empty_cache()

    def memory_allocated_bytes(self) -> int:
        """Bytes held by tensors on the current device."""
        import torch

        return torch.cuda.memory_allocated()

    def max_memory_allocated_bytes(self) -> int:
        """Largest number of bytes held by tensors on the current device."""
        import torch

        return torch.cuda.max_memory_allocated()

    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """So many GPUs."""
        return {"num_gpus": num_devices}

    def rollout_env_vars(self) -> dict[str, str]:
        """NCCL's cuMem allocator stays off: it clashes with engines that remap device memory."""
        return {"NCCL_CUMEM_ENABLE": "0"}

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """An NVTX range."""
        import torch

        return torch.cuda.nvtx.range(name)
