"""Common base of accelerators with a torch device module (`torch.cuda`, `torch.npu`, ...).

Promises: a probe imports a vendor's package only if it is installed, starts no process, opens no
device and never raises. A device that is counted may still not work.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from hardware.base import Availability, CopyStream, PlatformBase
from infra.job_environments import TORCH_BUILDS
from infra.plugins import reason_of
from infra.survey_report import DeviceFacts, FoundDevice

if TYPE_CHECKING:
    import torch

PeakTable = Sequence[tuple[str, Mapping[str, float]]]
"""Words of a product name -> dtype -> dense FLOP/s; the first entry that occurs in the name wins.
"""

CPU_STATE = "cpu"


class _DeviceStream(CopyStream):
    def __init__(self, module: Any) -> None:
        self._module, self._stream = module, module.Stream()

    def copy(self, source: "torch.Tensor", target: "torch.Tensor") -> None:
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # Else the allocator could lend the memory to later computation before the copy has run.
        (source if target.device.type == "cpu" else target).record_stream(self._stream)

    def join(self) -> None:
        self._module.current_stream().wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


def _architecture(properties: Any) -> str | None:
    # AMD's has the first, NVIDIA's the second.
    name = getattr(properties, "gcnArchName", None)
    if name is None and hasattr(properties, "major"):
        return f"sm_{properties.major}{properties.minor}"
    return name


class AcceleratorPlatform(PlatformBase):
    """Devices behind a torch device module.

    Attributes:
        vendor_package: package with the device module; None: torch itself provides the module.
        built_for: first word of `torch_build` that this vendor needs; None accepts every build.
        peaks: dense FLOP/s by product and dtype, see `PeakTable`.
        fp8_architectures: beginnings of the architectures that multiply 8-bit floats.
    """

    vendor_package: ClassVar[str | None] = None
    built_for: ClassVar[str | None] = None
    peaks: ClassVar[PeakTable] = ()
    fp8_architectures: ClassVar[tuple[str, ...]] = ()

    @property
    def device_module(self) -> Any:
        """The device module of torch; imports torch and the vendor's package, if any."""
        torch = importlib.import_module("torch")
        if self.vendor_package is not None:  # torch skips it if TORCH_DEVICE_BACKEND_AUTOLOAD=0
            importlib.import_module(self.vendor_package)
        return getattr(torch, self.device_name)

    def build_problem(self, torch: ModuleType) -> str | None:
        """Return why the installed torch is not built for this vendor; None if it is."""
        built = torch_build(torch).partition(" ")[0]
        return None if self.built_for in {None, built} else f"torch built for {built}"

    def is_available(self) -> Availability:
        """Check that torch and the vendor's package are installed, fit, and count a device."""
        package = self.vendor_package
        if not is_installed("torch"):
            return Availability(False, "torch is not installed")
        if package is not None and not is_installed(package):
            return Availability(False, f"{package} is not installed")
        try:
            torch = importlib.import_module("torch")
            if problem := self.build_problem(torch):
                return Availability(False, problem)
            module = self.device_module
            # device_count() uses the management library where there is one, which does not open
            # the device; is_available() asks the runtime, which also detects an old driver.
            count = module.device_count()
            usable = count > 0 and module.is_available()
        except Exception as error:  # noqa: BLE001  vendor boundary: any reason is the answer
            return Availability(False, f"{package or 'torch'} does not load: {reason_of(error)}")
        built = f"torch {torch.__version__} built for {torch_build(torch)}"
        if not usable:
            return Availability(False, f"{built}, but no driver or no device")
        return Availability(True, f"{count} x {self.vendor_name} {self.device_name}; {built}")

    def device_count(self) -> int:
        """Return the number of devices visible to this process."""
        return self.device_module.device_count()

    def device(self) -> "torch.device":
        """Return the current device."""
        import torch

        return torch.device(self.device_name, self.device_module.current_device())

    def device_label(self) -> str:
        """Return the driver's name of the current device; opens it."""
        return str(self.device_module.get_device_name())

    def device_facts(self) -> DeviceFacts:
        """See the base class."""
        module, torch = self.device_module, importlib.import_module("torch")
        version = getattr(getattr(module, self.communication_backend, None), "version", None)
        return DeviceFacts(
            runtime=torch_build(torch),
            driver=self.driver_version(),
            communication=version
            and f"{self.communication_backend.upper()} {'.'.join(map(str, version()))}",
            links=self.links(),
            attention=self.choose_attention(),
            devices=tuple(self._found(number) for number in range(module.device_count())),
        )

    def driver_version(self) -> str | None:
        """Return the version of the driver; None if the vendor has no way to ask."""
        return None

    def links(self) -> str | None:
        """Return the number of device pairs per kind of link; see `driver_version`."""
        return None

    def _found(self, number: int) -> FoundDevice:
        module = self.device_module
        properties = module.get_device_properties(number)
        ask = getattr(module, "mem_get_info", None)
        return FoundDevice(
            label=properties.name,
            architecture=_architecture(properties),
            total_bytes=properties.total_memory,
            free_bytes=None if ask is None else ask(number)[0],
        )

    def supports_fp8(self) -> bool:
        """See the base class."""
        module = self.device_module
        found = _architecture(module.get_device_properties(module.current_device()))
        return (found or "").startswith(self.fp8_architectures)

    def device_uuid(self) -> str | None:
        """Return the driver's identifier of the current device, or None; opens the device."""
        module = self.device_module
        found = getattr(module.get_device_properties(module.current_device()), "uuid", None)
        return None if found is None else str(found)

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """Look the device's product name up in `peaks`."""
        label = self.device_label()
        known = (p for words, p in self.peaks if re.search(rf"(?i)\b{re.escape(words)}\b", label))
        return next(known, {}).get(dtype)

    def set_device(self, index: int) -> None:
        """Make a device the current one."""
        self.device_module.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self.device_module.synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator and that of every device."""
        import torch

        torch.manual_seed(seed)
        self.device_module.manual_seed_all(seed)

    def rng_state(self) -> "Mapping[str, torch.Tensor]":
        """Return the CPU generator's state as `cpu`, the current device's under its device type."""
        import torch

        return {
            CPU_STATE: torch.get_rng_state(),
            self.device_name: self.device_module.get_rng_state(),
        }

    def set_rng_state(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Restore the generators that the state names."""
        import torch

        if CPU_STATE in state:
            torch.set_rng_state(state[CPU_STATE])
        if self.device_name in state:
            self.device_module.set_rng_state(state[self.device_name])

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        self.device_module.empty_cache()

    def total_memory_bytes(self) -> int | None:
        """Return the memory that the driver offers, used or not."""
        module = self.device_module
        return int(module.get_device_properties(module.current_device()).total_memory)

    def memory_allocated_bytes(self) -> int:
        """Bytes held by tensors on the current device."""
        return self.device_module.memory_allocated()

    def max_memory_allocated_bytes(self) -> int:
        """Largest number of bytes held by tensors on the current device."""
        return self.device_module.max_memory_allocated()

    def free_memory_bytes(self) -> int | None:
        """Bytes that are free on the device or unused in torch's allocator; None if unknown."""
        module = self.device_module
        if not hasattr(module, "mem_get_info"):
            return None
        unused = module.memory_reserved() - module.memory_allocated()
        return module.mem_get_info()[0] + unused

    def copy_stream(self) -> CopyStream | None:
        """Return a stream of the current device."""
        return _DeviceStream(self.device_module)

    def ray_resource_options(self, num_devices: int) -> dict[str, object]:
        """Return a request for `ray_resource`; Ray has a keyword of its own for `GPU`."""
        if self.ray_resource == "GPU":
            return {"num_gpus": num_devices}
        return {"resources": {self.ray_resource: num_devices}}


def is_installed(package: str) -> bool:
    """Return True if a top-level package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def torch_build(torch: ModuleType) -> str:
    """Return `maca`, `rocm`, `CUDA` or `xpu` with the version torch was built for, else `cpu`."""
    built = ((name, getattr(torch.version, each, None)) for each, name in TORCH_BUILDS.items())
    return next((f"{name} {version}" for name, version in built if version), "cpu")
