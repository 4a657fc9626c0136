"""MetaX GPUs through MACA, whose torch calls them `cuda` and their collectives `nccl`.

Its build states a CUDA version too; `torch.version.maca` tells it from NVIDIA's.
"""

from types import ModuleType

from hardware.accelerator import AcceleratorPlatform, cuda_build_problem


class MetaXPlatform(AcceleratorPlatform):
    """MACA devices. Their peaks are not published in a form that could be cited here."""

    device_name = "cuda"
    vendor_name = "metax"
    communication_backend = "nccl"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    supports_ipc = True

    def build_problem(self, torch: ModuleType) -> str | None:
        """Needs a MACA build."""
        return cuda_build_problem(torch, "maca")
