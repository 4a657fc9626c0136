"""The CPU as a platform: one "device" per process, collectives through gloo."""

import platform
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from hardware.base import Availability, PlatformBase
from hardware.ipc_memory import HostIpcMemory, IpcMemory

if TYPE_CHECKING:
    import torch


class CPUPlatform(PlatformBase):
    """The host's processor. Memory figures are those of the whole process."""

    device_name = "cpu"
    vendor_name = "cpu"
    communication_backend = "gloo"
    ray_resource = "CPU"
    supports_ipc = True

    def is_available(self) -> Availability:
        """Always available."""
        return Availability(True, "a CPU is always there")

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def device(self) -> "torch.device":
        """Return the CPU device."""
        import torch

        return torch.device("cpu")

    def device_label(self) -> str:
        """Return the processor's architecture."""
        return platform.machine() or "cpu"

    def ipc_memory(self) -> IpcMemory:
        """Return anonymous shared memory of the host."""
        return HostIpcMemory()

    def device_uuid(self) -> str | None:
        """Return None: ranks of one host share the CPU."""
        return None

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Return None: the peak depends on clocks and cores that other processes share."""
        return None

    def supports_fp8(self) -> bool:
        """Return True: torch computes them on every CPU, slowly."""
        return True

    def set_device(self, index: int) -> None:
        """Do nothing for any index: ranks of one host share the CPU."""

    def synchronize(self) -> None:
        """Do nothing: CPU operations are synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        import torch

        torch.manual_seed(seed)

    def rng_state(self) -> "Mapping[str, torch.Tensor]":
        """Return the state of torch's default generator as `cpu`."""
        import torch

        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Restore torch's default generator."""
        import torch

        if "cpu" in state:
            torch.set_rng_state(state["cpu"])

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def memory_allocated_bytes(self) -> int:
        """Return the resident set size of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated_bytes(self) -> int:
        """Return the largest resident set size so far (Linux counts it in KiB)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """Request cores."""
        return {"num_cpus": num_devices}

    def rollout_env_vars(self) -> dict[str, str]:
        """Leave vLLM's threads unbound: training runs on the same cores."""
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Replace what Megatron-Core and TorchTitan expect of CUDA."""
        if library == "megatron":
            from hardware.cpu_megatron import megatron_on_cpu

            return megatron_on_cpu()
        if library == "torchtitan":
            from hardware.cpu_torchtitan import torchtitan_on_cpu

            return torchtitan_on_cpu()
        return nullcontext()
