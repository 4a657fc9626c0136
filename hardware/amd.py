"""AMD GPUs through ROCm, which torch calls `cuda`, and RCCL, which torch calls `nccl`."""

from contextlib import AbstractContextManager

from hardware.accelerator import AcceleratorPlatform
from hardware.base import Availability
from hardware.ipc_memory import IpcMemory, RuntimeIpcMemory
from infra import env


class AMDPlatform(AcceleratorPlatform):
    """ROCm devices."""

    device_name = "cuda"
    vendor_name = "amd"
    communication_backend = "nccl"
    visible_devices_env = "HIP_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"
    supports_ipc = True
    built_for = "rocm"
    fp8_architectures = ("gfx942", "gfx950", "gfx12")

    # AMD Instinct data sheets, dense matrix figures. MI250 and MI250X expose each of their two
    # dies as a device, so their figures are half of the card's.
    peaks = (
        ("MI355X", {"bfloat16": 2516.6e12, "float16": 2516.6e12, "float32": 157.3e12}),
        ("MI350X", {"bfloat16": 2306.9e12, "float16": 2306.9e12, "float32": 144.2e12}),
        ("MI325X", {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12}),
        ("MI300X", {"bfloat16": 1307.4e12, "float16": 1307.4e12, "float32": 163.4e12}),
        ("MI300A", {"bfloat16": 980.6e12, "float16": 980.6e12, "float32": 122.6e12}),
        ("MI250X", {"bfloat16": 191.5e12, "float16": 191.5e12, "float32": 47.9e12}),
        ("MI250", {"bfloat16": 181.05e12, "float16": 181.05e12, "float32": 45.3e12}),
    )

    def is_available(self) -> Availability:
        """Check also that Ray, which refuses a lone ROCR_VISIBLE_DEVICES, can start workers."""
        found = super().is_available()
        if found.ok and env.ROCR_VISIBLE_DEVICES.get() and not env.HIP_VISIBLE_DEVICES.get():
            return Availability(
                False,
                "ROCR_VISIBLE_DEVICES is set, which Ray refuses; set HIP_VISIBLE_DEVICES instead",
            )
        return found

    def ipc_memory(self) -> IpcMemory:
        """Return memory through the HIP runtime."""
        return RuntimeIpcMemory("hip", "libamdhip64")

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Return a roctx range, which a ROCm build provides through the NVTX interface."""
        import torch

        return torch.cuda.nvtx.range(name)
