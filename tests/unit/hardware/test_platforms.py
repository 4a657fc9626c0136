"""Which platform is chosen, why, and what the CPU answers."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from hardware.base import Availability
from hardware.cpu import CPUPlatform
from hardware.nvidia import NvidiaPlatform
from hardware.registry import PlatformRegistry, built_in_registry, detect
from infra.errors import ConfigError

CPU_ONLY = torch.version.cuda is None


class AbsentPlatform(CPUPlatform):
    def is_available(self) -> Availability:
        return Availability(False, "no such chip")


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)


def test_auto_says_what_it_chose_and_why_not_the_others() -> None:
    platform, reason = detect()
    if CPU_ONLY:
        assert platform.device_name == "cpu"
        assert reason.startswith("cpu: ")
        assert "not nvidia: torch built for cpu" in reason


@pytest.mark.skipif(not CPU_ONLY, reason="needs a torch built without CUDA")
@pytest.mark.parametrize("name", ["cuda", "nvidia"])
def test_an_absent_platform_is_an_error_and_no_fallback(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(name)
    assert str(caught.value).startswith(
        f"hardware.platform: {name} asked, not available (torch built for cpu); use cpu"
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no 'nvidai'; known: auto, nvidia, cpu; did you mean"):
        detect("nvidai")


def test_the_environment_overrides_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PLATFORM", "cpu")
    platform, reason = detect("nvidia")
    assert platform.device_name == "cpu"
    assert "RLHF_PLATFORM" in reason


def test_a_name_is_registered_once() -> None:
    registry = PlatformRegistry()
    registry.register("mine", "a:B")
    with pytest.raises(ConfigError, match="registered by both a:B and c:D"):
        registry.register("mine", "c:D")


def test_the_cpu_is_probed_last_and_absent_chips_are_skipped() -> None:
    registry = PlatformRegistry()
    registry.register("cpu", "hardware.cpu:CPUPlatform")
    registry.register("chip", f"{__name__}:AbsentPlatform")
    registry.register("broken", "no_such_module_here:Platform")
    sys.modules.setdefault(__name__, sys.modules[AbsentPlatform.__module__])
    assert registry.names()[-1] == "cpu"
    platform, reason = registry.detect()
    assert type(platform) is CPUPlatform
    assert "not chip: no such chip" in reason
    assert "not broken: cannot be imported" in reason


def test_other_distributions_register_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("platform.mine", "hardware.cpu:CPUPlatform", "rlhf.plugins")
    other = EntryPoint("backend.mine", "x:Y", "rlhf.plugins")
    monkeypatch.setattr("hardware.registry.entry_points", lambda group: [entry, other])
    assert built_in_registry().names() == ["mine", "nvidia", "cpu"]


def test_platforms_are_listed_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hardware.registry import names; import hardware.cpu, hardware.nvidia\n"
        "print(names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "nvidia" in done.stdout


def test_cpu_answers() -> None:
    platform = CPUPlatform()
    assert platform.device() == torch.device("cpu")
    assert platform.ray_resource_options(3) == {"num_cpus": 3}
    assert 0 < platform.memory_allocated_bytes() <= platform.max_memory_allocated_bytes() * 1.05
    platform.manual_seed(5)
    state = {name: tensor.clone() for name, tensor in platform.rng_state().items()}
    drawn = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    with platform.profiler_range("span"):
        pass


def test_nvidia_declares_what_ray_and_nccl_need() -> None:
    platform = NvidiaPlatform()
    assert platform.communication_backend == "nccl"
    assert platform.ray_resource_options(1) == {"num_gpus": 1}
    assert platform.visible_devices_env == "CUDA_VISIBLE_DEVICES"
    assert platform.is_available().reason
