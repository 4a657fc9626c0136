"""The CPU as a platform of its own: asked for or the last resort, and always said so.

One "device" per process; parallelism between processes goes over gloo.
"""

import platform
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from hardware.base import Availability, PlatformBase

if TYPE_CHECKING:
    import torch


class CPUPlatform(PlatformBase):
    """The host's processor. Memory figures are those of the whole process."""

    device_name = "cpu"
    vendor_name = "cpu"
    communication_backend = "gloo"
    visible_devices_env = None
    ray_resource = "CPU"
    ray_noset_env = None
    supports_ipc = False

    def is_available(self) -> Availability:
        """Always."""
        return Availability(True, "a CPU is always there")

    def device_count(self) -> int:
        """Always 1: a process computes on its host."""
        return 1

    def device(self) -> "torch.device":
        """The CPU."""
        import torch

        return torch.device("cpu")

    def device_label(self) -> str:
        """The processor's architecture."""
        return platform.machine() or "cpu"

    def device_uuid(self) -> str | None:
        """None: ranks of one host share it."""
        return None

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """None: it depends on clocks and cores that other processes share."""
        return None

    def set_device(self, index: int) -> None:
        """Accept every index: ranks on one host share the CPU."""

    def synchronize(self) -> None:
        """Nothing to wait for; CPU operations are done when they return."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        import torch

        torch.manual_seed(seed)

    def rng_state(self) -> "Mapping[str, torch.Tensor]":
        """Torch's default generator as `cpu`."""
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Restore torch's default generator."""
        import torch

        if "cpu" in state:
            torch.set_rng_state(state["cpu"])

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory_allocated_bytes(self) -> int:
        """Resident set size of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated_bytes(self) -> int:
        """Largest resident set size of this process so far (Linux counts it in KiB)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """So many cores."""
        return {"num_cpus": num_devices}

    def rollout_env_vars(self) -> dict[str, str]:
        """Threads go where the system puts them: training runs on the same cores."""
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Megatron-Core and TorchTitan expect CUDA in places; on a CPU those are stood in for."""
        if library == "megatron":
            from hardware.cpu_megatron import megatron_on_cpu

            return megatron_on_cpu()
        if library == "torchtitan":
            from hardware.cpu_torchtitan import torchtitan_on_cpu

            return torchtitan_on_cpu()
        return nullcontext()
