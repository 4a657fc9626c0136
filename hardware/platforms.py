"""The table of platforms; imports none of them."""

from dataclasses import dataclass
from pathlib import Path

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


def device_modules(library: str | None = None) -> tuple[str, ...]:
    """The modules of this project that decide what a device computes.

    Which platform a job will find is not known to whoever plans it: those of all platforms count.

    Args:
        library: training backend whose repairs for a platform (`cpu_megatron`) count too.

    Returns:
        Module names, sorted.
    """
    modules = {row.module for row in PLATFORMS.rows}
    repairs = {f"{module}_{library}" for module in modules if library}
    here = Path(__file__)
    found = {name for name in repairs if here.with_name(f"{name.partition('.')[2]}.py").exists()}
    return tuple(sorted(modules | found))
