"""The platform `example_chip`: the CPU under another vendor's name.

A real chip with a torch device module subclasses `hardware.accelerator.AcceleratorPlatform` and
states its facts; this one has no device module, so it borrows the CPU's answers.
"""

from hardware.base import Availability
from hardware.cpu import CPUPlatform

_PEAK_FLOPS_PER_S = {"float32": 1e12, "bfloat16": 2e12}


class ExampleChipPlatform(CPUPlatform):
    """One pretended chip."""

    vendor_name = "example"

    def is_available(self) -> Availability:
        """Always: it pretends."""
        return Availability(True, "the CPU, pretending to be an example chip")

    def device_label(self) -> str:
        """Its product name."""
        return "Example Chip 1"

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """As made up as the chip."""
        return _PEAK_FLOPS_PER_S.get(dtype)

    def rollout_env_vars(self) -> dict[str, str]:
        """Tells a rollout engine's process what it runs on."""
        return {"EXAMPLE_CHIP": "1"}
