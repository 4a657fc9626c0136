"""The shared half of the accelerators, on stand-in device modules: no such chip is here."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hardware.accelerator import AcceleratorPlatform, is_installed, torch_build
from hardware.cambricon import CambriconPlatform
from hardware.huawei import HuaweiPlatform
from hardware.intel import IntelPlatform
from infra.errors import ConfigError


class DeviceModule:
    """What a vendor's package hangs into torch; remembers how it was called."""

    def __init__(self, count: int = 2) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.generator = torch.Generator()
        self.count = count

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any) -> None:
            self.calls.append((name, *args))

        return called

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return self.count > 0

    def current_device(self) -> int:
        return 1

    def get_device_name(self) -> str:
        return "Ascend910B3"

    def get_device_properties(self, index: int) -> object:
        return SimpleNamespace(uuid=f"uuid-of-{index}", total_memory=64 + index)

    def get_rng_state(self) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self.generator.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def memory_allocated(self) -> int:
        return 7

    def max_memory_allocated(self) -> int:
        return 9


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> DeviceModule:
    made = DeviceModule()
    for name in ("npu", "mlu"):
        monkeypatch.setitem(sys.modules, f"torch_{name}", ModuleType(f"torch_{name}"))
        monkeypatch.setattr(torch, name, made, raising=False)
    return made


@pytest.fixture(params=[HuaweiPlatform, CambriconPlatform])
def platform(request: pytest.FixtureRequest, module: DeviceModule) -> AcceleratorPlatform:
    return request.param()


def test_facts_are_of_every_device() -> None:
    class Module(DeviceModule):
        cnclx = SimpleNamespace(version=lambda: (2, 29, 7))

        def get_device_properties(self, index: int) -> object:
            shared = {"name": f"Chip {index}", "total_memory": 100 + index}
            own = {"major": 9, "minor": 0} if index else {"gcnArchName": "gfx942", "major": 9}
            return SimpleNamespace(**shared, **own)

        def mem_get_info(self, index: int) -> tuple[int, int]:
            return 50 + index, 100 + index

    class Platform(CambriconPlatform):
        communication_backend = "cnclx"
        device_module = property(lambda _: Module())

        def driver_version(self) -> str:
            return "1.2"

    facts = Platform().device_facts()
    assert (facts.driver, facts.communication, facts.links) == ("1.2", "CNCLX 2.29.7", None)
    assert facts.runtime == torch_build(torch)
    assert [tuple(each.model_dump().values()) for each in facts.devices] == [
        ("Chip 0", "gfx942", 100, 50),
        ("Chip 1", "sm_90", 101, 51),
    ]
    Module.mem_get_info = None  # pyright: ignore[reportAttributeAccessIssue]
    Module.cnclx = SimpleNamespace()
    facts = Platform().device_facts()
    assert facts.communication is None
    assert [each.free_bytes for each in facts.devices] == [None, None]


def test_a_probe_counts_and_does_not_open(
    platform: AcceleratorPlatform, module: DeviceModule
) -> None:
    found = platform.is_available()
    assert found.ok
    assert found.reason.startswith(f"2 x {platform.vendor_name} {platform.device_name}; torch ")
    assert module.calls == []
    module.count = 0
    found = platform.is_available()
    assert not found.ok
    assert found.reason.endswith("no driver or no device")


@pytest.mark.parametrize(
    "error", [ImportError("libascendcl.so\nnot found"), RuntimeError("no toolkit")]
)
def test_a_vendor_package_that_fails_is_a_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        """Found by `find_spec`, and raises when it is imported."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, self) if name == "torch_npu" else None

        def create_module(self, spec: object) -> None:
            raise error

        def exec_module(self, module: object) -> None:
            raise error

    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    found = HuaweiPlatform().is_available()
    assert not found.ok
    words = " ".join(str(error).split())
    assert found.reason == f"torch_npu does not load: {type(error).__name__}: {words}"


def test_device_and_memory_calls(platform: AcceleratorPlatform, module: DeviceModule) -> None:
    assert platform.device_count() == 2
    assert platform.device_uuid() == "uuid-of-1"
    assert platform.total_memory_bytes() == 65
    assert platform.memory_allocated_bytes() == 7
    assert platform.max_memory_allocated_bytes() == 9
    platform.set_device(1)
    platform.synchronize()
    platform.empty_cache()
    assert module.calls == [("set_device", 1), ("synchronize",), ("empty_cache",)]


def test_random_states_round_trip(platform: AcceleratorPlatform, module: DeviceModule) -> None:
    def draw() -> list[float]:
        both = torch.rand(2), torch.rand(2, generator=module.generator)
        return torch.cat(both).tolist()

    platform.manual_seed(5)
    first, state = draw(), {k: v.clone() for k, v in platform.rng_state().items()}
    assert sorted(state) == sorted(["cpu", platform.device_name])
    second = draw()
    platform.set_rng_state({**state, "other": state["cpu"]})
    assert draw() == second
    platform.manual_seed(5)
    assert draw() == first


def test_an_uuid_that_torch_does_not_pass_on_is_none(
    platform: AcceleratorPlatform, module: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "get_device_properties", lambda index: SimpleNamespace())
    assert platform.device_uuid() is None


def test_ascend_marks_a_range(module: DeviceModule) -> None:
    marks: list[tuple[str, object]] = []

    class Mstx:
        def range_start(self, name: str) -> int:
            marks.append(("start", name))
            return 17

        def range_end(self, started: int) -> None:
            marks.append(("end", started))

    module.__dict__["mstx"] = Mstx()
    with pytest.raises(ZeroDivisionError), HuaweiPlatform().profiler_range("step"):
        raise ZeroDivisionError
    assert marks == [("start", "step"), ("end", 17)]


def test_megatron_on_ascend_needs_mindspeed(
    module: DeviceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"training.backend: megatron on npu needs MindSpeed"):
        HuaweiPlatform().library_scope("megatron")
    with HuaweiPlatform().library_scope("torchtitan"):
        pass
    order: list[str] = []

    class Adaptor:
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            from importlib.machinery import ModuleSpec

            if name.partition(".")[0] != "mindspeed":
                return None
            return ModuleSpec(name, self, is_package=name == "mindspeed")

        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, loaded: ModuleType) -> None:
            order.append(loaded.__name__)

    monkeypatch.setattr(sys, "meta_path", [Adaptor(), *sys.meta_path])
    with HuaweiPlatform().library_scope("megatron"):
        order.append("megatron")
    assert order == ["mindspeed", "mindspeed.megatron_adaptor", "megatron"]
    for name in ("mindspeed", "mindspeed.megatron_adaptor"):
        sys.modules.pop(name)


def test_intel_needs_a_torch_with_xpu_and_marks_itt_ranges() -> None:
    platform = IntelPlatform()
    if not torch.xpu._is_compiled():
        assert platform.is_available().reason == "torch built without xpu"
    if torch.profiler.itt.is_available():
        with platform.profiler_range("span"):
            pass


def test_builds_by_their_version() -> None:
    def built(**versions: str | None) -> str:
        build = ModuleType("torch")
        build.__dict__["version"] = SimpleNamespace(**versions)
        return torch_build(build)

    assert built(cuda=None, hip=None, xpu=None) == "cpu"
    assert built(cuda="13.0", hip=None) == "CUDA 13.0"
    assert built(cuda=None, hip="7.0") == "rocm 7.0"
    assert built(cuda="11.6", maca="3.8") == "maca 3.8"
    assert built(xpu="20250202") == "xpu 20250202"


def test_installed_package_is_detected_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_installed("this_package_is_not_here") is False
    assert is_installed("colorsys")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert is_installed("torch_npu") is False
