"""Cambricon MLUs through torch_mlu and CNCL.

Ray has no support for them: start a node with ``ray start --resources '{"MLU": 8}'``. Ray writes no
MLU_VISIBLE_DEVICES, so each rank chooses its device by its rank on the host.
"""

from hardware.accelerator import AcceleratorPlatform


class CambriconPlatform(AcceleratorPlatform):
    """MLU devices; the vendor publishes no peaks that could be cited."""

    device_name = "mlu"
    vendor_name = "cambricon"
    communication_backend = "cncl"
    visible_devices_env = "MLU_VISIBLE_DEVICES"
    ray_resource = "MLU"
    vendor_package = "torch_mlu"
