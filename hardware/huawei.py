"""Huawei Ascend NPUs through torch_npu, the Ascend toolkit and HCCL.

Torch loads an installed torch_npu when it is imported itself; where the toolkit is missing that
import fails, and TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch usable.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from hardware.accelerator import AcceleratorPlatform, is_installed
from infra.errors import ConfigError


class HuaweiPlatform(AcceleratorPlatform):
    """Ascend devices.

    Sharing an allocation between processes needs a driver and a toolkit whose versions only a
    command line tells, and a probe starts no process: it is taken as not supported.
    """

    device_name = "npu"
    vendor_name = "huawei"
    communication_backend = "hccl"
    visible_devices_env = "ASCEND_RT_VISIBLE_DEVICES"
    ray_resource = "NPU"
    ray_noset_env = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    supports_ipc = False
    vendor_package = "torch_npu"

    # Cube cores x 8192 FLOP per cycle (16 x 16 x 16 multiply-adds) x clock: 24 cores at 1.8 GHz
    # in 910B2, 20 in 910B3, 20 at 1.5 GHz in 910B4. The cube unit has no float32 product.
    peaks = (
        ("Ascend910B2", {"bfloat16": 353.9e12, "float16": 353.9e12}),
        ("Ascend910B3", {"bfloat16": 294.9e12, "float16": 294.9e12}),
        ("Ascend910B4", {"bfloat16": 245.8e12, "float16": 245.8e12}),
    )

    def rollout_env_vars(self) -> dict[str, str]:
        """Weights stay in the plain layout: reloading them into the blocked one is not possible."""
        return {"VLLM_ASCEND_ENABLE_NZ": "0"}

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """A range of msTX, the marks that Ascend's profiler shows."""
        marks = self.device_module.mstx
        started = marks.range_start(name)
        try:
            yield
        finally:
            marks.range_end(started)

    def library_scope(self, library: str) -> AbstractContextManager[None]:
        """Megatron runs here through MindSpeed, which patches it when it is imported."""
        if library == "megatron":
            if not is_installed("mindspeed"):
                raise ConfigError(
                    "training.backend",
                    "megatron on npu needs MindSpeed; no module named mindspeed; install the "
                    "release that fits your megatron-core",
                )
            importlib.import_module("mindspeed.megatron_adaptor")
        return nullcontext()
