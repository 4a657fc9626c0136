"""The machines that `rlhf plan --on` knows, and machines described in a file.

A name is a kind of device and how many there are: `h100x8` is one node, `h100x128` sixteen.
Figures are those of data sheets, dense and per device; memory is what the driver offers a process
(`torch.cuda.get_device_properties(0).total_memory`), which is less than the product's name says.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from engines.config.base import StrictModel
from infra.errors import ConfigError

_OPTION = "--on"


class Machine(StrictModel):
    """Devices of one kind, in nodes. Rates are of one device, in one direction.

    Links go to devices of the same node, to other nodes, and to the memory of the host, which is
    that of a node. `peak_flops_per_s` is dense, by dtype.
    """

    name: str
    platform: str
    num_devices: int = Field(ge=1)
    devices_per_node: int = Field(default=8, ge=1)
    memory_bytes: int = Field(ge=1)
    peak_flops_per_s: dict[str, float] = Field(min_length=1)
    memory_bytes_per_s: float = Field(gt=0)
    link_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    host_link_bytes_per_s: float = Field(gt=0)
    host_memory_bytes: int = Field(ge=1)

    @property
    def num_per_node(self) -> int:
        """Devices that share one host."""
        return min(self.num_devices, self.devices_per_node)

    @property
    def exchange_bytes_per_s(self) -> float:
        """Rate of a device in collectives of all devices."""
        is_one_node = self.num_devices <= self.devices_per_node
        return self.link_bytes_per_s if is_one_node else self.network_bytes_per_s

    def peak(self, dtype: str) -> float:
        """Return the peak of one device; the smallest known one for a dtype without a figure."""
        return self.peak_flops_per_s.get(dtype) or min(self.peak_flops_per_s.values())

    def with_devices(self, num_devices: int) -> "Machine":
        """Return the machine with another number of devices; each has its part of the host."""
        share = self.host_memory_bytes // self.num_per_node
        return self.model_copy(
            update={
                "name": re.sub(r"x[0-9]+$", "", self.name) + f"x{num_devices}",
                "num_devices": num_devices,
                "host_memory_bytes": share * min(num_devices, self.devices_per_node),
            }
        )


KINDS: Mapping[str, Machine] = {
    name: Machine.model_validate(values)
    for name, values in json.loads(
        Path(__file__).with_name("machines.json").read_text(encoding="utf-8")
    ).items()
}
"""Nodes of eight devices by name, as files describe them; peaks are those of `hardware`.

Data sheets: A100 80GB (SXM4, 2022), H100 (SXM5, 2023), H200 (SXM5, 2024), HGX B200 (2025), MI300X
(2023, seven links of 64 GB/s). Links to devices are half of the two-way figure, those to the host
PCIe x16. The network is one 400 Gb/s port a device (A100: 200), host memory that of DGX and HGX.
"""


def machine_of(text: str) -> Machine:
    """Return the machine of a name (`h100x8`) or JSON file; `ConfigError` if it is invalid."""
    if text.endswith(".json"):
        return read_machine(Path(text).expanduser())
    kind, _, number = text.lower().rpartition("x")
    if kind not in KINDS or not re.fullmatch("[1-9][0-9]{0,5}", number):
        known = ", ".join(f"{name}xN" for name in KINDS)
        raise ConfigError(
            _OPTION,
            f"got {text!r}; need {known} (N devices, as in h100x8), or a .json file that describes "
            "a machine; choose one",
        )
    return KINDS[kind].model_copy(update={"name": kind}).with_devices(int(number))


def read_machine(path: Path) -> Machine:
    """Read a machine from JSON; `ConfigError` if it is absent, no JSON or invalid."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not JSON: {error}"
        raise ConfigError(
            _OPTION, f"got {path} ({reason}); need a JSON file that describes a machine"
        ) from None
    return Machine.validated(values, f"{_OPTION} {path.name}")


def machine_like(platform: str, product: str, memory_bytes: int, num_devices: int) -> Machine:
    """Return a machine with the memory and number of the devices at hand.

    Rates are those of the kind that the product name contains, else the H100's.
    """
    kind = next((each for each in KINDS.values() if each.name in product), KINDS["h100"])
    return kind.model_copy(
        update={"platform": platform, "memory_bytes": memory_bytes, "name": product}
    ).with_devices(num_devices)
