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
            The first is torch's; without any, torch calls the device as the platform.
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


def repair_modules(platform: str, library: str | None) -> tuple[str, ...]:
    """The modules of this project that let a library run on a platform (`hardware.cpu_megatron`).

    Args:
        platform: name of a row.
        library: training backend; None has no repairs.

    Returns:
        Module names; beside that of the platform itself.
    """
    here = Path(__file__)
    names = [f"{row.module}_{library}" for row in PLATFORMS.rows if row.name == platform]
    return tuple(n for n in names if here.with_name(f"{n.partition('.')[2]}.py").exists())
