"""MetaX GPUs through MACA; only `torch.version.maca` distinguishes its torch from NVIDIA's."""

from hardware.accelerator import AcceleratorPlatform


class MetaXPlatform(AcceleratorPlatform):
    """MACA devices; the vendor publishes no peaks that could be cited."""

    device_name = "cuda"
    vendor_name = "metax"
    communication_backend = "nccl"
    visible_devices_env = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    built_for = "maca"
