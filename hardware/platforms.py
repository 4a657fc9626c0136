"""The table of platforms; imports none of them."""

from dataclasses import dataclass

from infra.plugin_table import PluginTable
from infra.plugins import Row


@dataclass(frozen=True, kw_only=True)
class PlatformRow(Row):
    """A platform; its target takes no arguments.

    Attributes:
        also_called: device types that users write where a vendor is meant; several may share one.
    """

    also_called: tuple[str, ...] = ()


PLATFORMS = PluginTable(
    "platform",
    "hardware.platform",
    [
        PlatformRow(name="nvidia", target="hardware.nvidia:NvidiaPlatform", also_called=("cuda",)),
        PlatformRow(name="amd", target="hardware.amd:AMDPlatform", also_called=("cuda", "rocm")),
        PlatformRow(name="huawei", target="hardware.huawei:HuaweiPlatform", also_called=("npu",)),
        PlatformRow(name="intel", target="hardware.intel:IntelPlatform", also_called=("xpu",)),
        PlatformRow(
            name="cambricon", target="hardware.cambricon:CambriconPlatform", also_called=("mlu",)
        ),
        PlatformRow(name="metax", target="hardware.metax:MetaXPlatform", also_called=("cuda",)),
        PlatformRow(name="cpu", target="hardware.cpu:CPUPlatform"),
    ],
    PlatformRow,
    other_forms=("auto",),
)
"""In the order of probing."""
