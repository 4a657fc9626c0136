"""The table of platforms; imports none of them."""

from dataclasses import dataclass
from pathlib import Path

from infra.plugins import PluginTable, Row


@dataclass(frozen=True, kw_only=True)
class PlatformRow(Row):
    """A platform; its target takes no arguments.

    `also_called` lists device types that users may write for it, torch's first; vendors may share
    them. If it is empty, torch's device type is the platform's name.
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
"""Built-in platforms in probing order."""


def repair_modules(platform: str, library: str | None) -> tuple[str, ...]:
    """Return the modules that patch a library for a platform (`hardware.cpu_megatron`), if any."""
    names = [f"{row.module}_{library}" for row in PLATFORMS.rows if row.name == platform]
    here = Path(__file__)
    return tuple(n for n in names if here.with_name(f"{n.partition('.')[2]}.py").exists())
