"""Huawei Ascend NPUs through torch_npu, the Ascend toolkit and HCCL.

Torch imports an installed torch_npu itself. Without the toolkit that import fails;
TORCH_DEVICE_BACKEND_AUTOLOAD=0 then keeps torch usable.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hardware.accelerator import AcceleratorPlatform, is_installed
from infra.errors import ConfigError


class HuaweiPlatform(AcceleratorPlatform):
    """Ascend devices; IPC depends on versions that a probe cannot read, so it is off."""

    device_name = "npu"
    vendor_name = "huawei"
    communication_backend = "hccl"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    vendor_package = "torch_npu"

    # Cube cores x 8192 FLOP per cycle (16 x 16 x 16 multiply-adds) x clock: 24 cores at 1.8 GHz
    # in 910B2, 20 in 910B3, 20 at 1.5 GHz in 910B4. The cube unit has no float32 product.
    peaks = (
        ("Ascend910B2", {"bfloat16": 353.9e12, "float16": 353.9e12}),
        ("Ascend910B3", {"bfloat16": 294.9e12, "float16": 294.9e12}),
        ("Ascend910B4", {"bfloat16": 245.8e12, "float16": 245.8e12}),
    )

    def rollout_env_vars(self) -> dict[str, str]:
        """Keep weights in the plain layout: they cannot be reloaded into the blocked one."""
        return {"VLLM_ASCEND_ENABLE_NZ": "0"}

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """Open an msTX range, which Ascend's profiler shows."""
        marks = self.device_module.mstx
        started = marks.range_start(name)
        try:
            yield
        finally:
            marks.range_end(started)

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Import MindSpeed, which patches Megatron for this device."""
        if library == "megatron":
            if not is_installed("mindspeed"):
                raise ConfigError(
                    "training.backend",
                    "megatron on npu needs MindSpeed; no module named mindspeed; install the "
                    "release that fits your megatron-core",
                )
            importlib.import_module("mindspeed.megatron_adaptor")
        return nullcontext()
