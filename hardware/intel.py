"""Intel GPUs through torch's own XPU support and oneCCL."""

from contextlib import AbstractContextManager
from types import ModuleType

from hardware.accelerator import AcceleratorPlatform


class IntelPlatform(AcceleratorPlatform):
    """XPU devices. oneCCL has no averaging reduction; callers sum and divide instead."""

    device_name = "xpu"
    vendor_name = "intel"
    communication_backend = "xccl"
    visible_devices_env = "ZE_AFFINITY_MASK"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK"

    # Cores x 8 matrix engines x 512 FLOP per cycle x highest clock. Max 1550 exposes each of its
    # two stacks of 64 cores (1.6 GHz) as a device; Max 1100 has one of 56 (1.55 GHz). Arc B580:
    # 20 cores x 2048 FLOP per cycle x 2.85 GHz.
    peaks = (
        ("Max 1550", {"bfloat16": 419.4e12, "float16": 419.4e12, "float32": 26.2e12}),
        ("Max 1100", {"bfloat16": 355.5e12, "float16": 355.5e12, "float32": 22.2e12}),
        ("B580", {"bfloat16": 116.7e12, "float16": 116.7e12, "float32": 14.6e12}),
    )

    def build_problem(self, torch: ModuleType) -> str | None:
        """Require a build with XPU."""
        return None if torch.xpu._is_compiled() else "torch built without xpu"

    def profiler_range(self, name: str) -> AbstractContextManager[object]:
        """Return an ITT range, which VTune shows."""
        import torch

        return torch.profiler.itt.range(name)
