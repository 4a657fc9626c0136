"""Which platform is chosen, why, and what a broken or ambiguous plugin costs."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from hardware.base import Availability
from hardware.cpu import CPUPlatform
from hardware.detection import detect, names
from hardware.platforms import PLATFORMS, PlatformRow
from infra.errors import ConfigError
from infra.plugins import Row, register_row

CPU_ONLY = torch.version.cuda is None and torch.version.hip is None
BUILT_IN = ["nvidia", "amd", "huawei", "intel", "cambricon", "metax", "cpu"]


class AbsentPlatform(CPUPlatform):
    def is_available(self) -> Availability:
        return Availability(False, "no such chip")


class RaisingPlatform(CPUPlatform):
    def is_available(self) -> Availability:
        raise OSError("libchip.so: cannot open")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: [])
    monkeypatch.setattr("infra.plugins._registered", [])
    # Under importlib mode a test module has no importable name of its own.
    monkeypatch.setitem(sys.modules, "platforms_of_test", sys.modules[AbsentPlatform.__module__])


def announce(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    entries = [
        EntryPoint(f"platform.{name}", target, "rlhf.plugins") for name, target in targets.items()
    ]
    monkeypatch.setattr("infra.plugins.entry_points", lambda group: entries)


def test_auto_says_what_it_chose_and_why_not_the_others() -> None:
    platform, reason = detect()
    if CPU_ONLY:
        assert platform.device_name == "cpu"
        assert reason.startswith("cpu: ")
        assert "not nvidia, amd, metax: torch built for cpu" in reason
        for name in BUILT_IN[:-1]:
            assert name in reason


@pytest.mark.skipif(not CPU_ONLY, reason="needs a torch built without CUDA")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cuda", "torch built for cpu"),
        ("nvidia", "torch built for cpu"),
        ("rocm", "torch built for cpu"),
        ("npu", "torch_npu is not installed"),
        ("cambricon", "torch_mlu is not installed"),
        ("intel", "torch built without xpu"),
    ],
)
def test_bad_input_row_42_absent_platform_fails_without_fallback(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(name)
    assert str(caught.value).startswith(
        f"hardware.platform: {name} was asked for and is not available ({why}); use cpu"
    )


def test_a_device_type_leads_to_the_vendor_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {
        "nvidia": "platforms_of_test:AbsentPlatform",
        "amd": "hardware.cpu:CPUPlatform",
        "metax": "no_such_module_here:Platform",
    }
    rows = [
        PlatformRow(name=name, target=target, also_called=("cuda",))
        for name, target in targets.items()
    ]
    monkeypatch.setattr(PLATFORMS, "rows", rows)
    assert detect("cuda")[1].startswith("amd: asked for by hardware.platform; ")


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = ", ".join([*sorted(BUILT_IN), "auto"])
    with pytest.raises(ConfigError, match=f"no 'nvidai'; known: {known}; did you mean nvidia"):
        detect("nvidai")


def test_the_environment_overrides_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PLATFORM", "cpu")
    platform, reason = detect("nvidia")
    assert platform.device_name == "cpu"
    assert "RLHF_PLATFORM" in reason


def test_platforms_of_others_are_probed_first_and_the_cpu_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announce(monkeypatch, zeta="hardware.cpu:CPUPlatform", chip="platforms_of_test:AbsentPlatform")
    register_row("platform", Row(name="late", target="platforms_of_test:AbsentPlatform"))
    assert names() == ["chip", "zeta", "late", *BUILT_IN]
    assert detect()[1] == "zeta: a CPU is always there (not chip: no such chip)"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module_here:Platform", "ModuleNotFoundError: No module named"),
        ("platforms_of_test:Absent", "AttributeError: module"),
        ("platforms_of_test:RaisingPlatform", "cannot be probed (OSError: libchip.so"),
        ("platforms_of_test:CPU_ONLY", "does not start (TypeError: 'bool' object is not"),
        ("raising_platform_module:Platform", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_plugin_costs_one_line_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, why: str
) -> None:
    (tmp_path / "raising_platform_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    announce(monkeypatch, broken=target)
    _, reason = detect()
    assert "not broken: " in reason
    assert why in reason
    assert "\n" not in reason
    assert detect("cpu")[0].device_name == "cpu"
    with pytest.raises(ConfigError) as caught:
        detect("broken")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_with_two_owners_is_refused_and_others_work() -> None:
    for target in ("one:Y", "other:Y"):
        register_row("platform", Row(name="chip", target=target))
    register_row("platform", Row(name="nvidia", target="x:Y"))
    assert detect("cpu")[0].device_name == "cpu"
    with pytest.raises(ConfigError, match="'chip' is registered by both one:Y .* and other:Y"):
        detect("chip")
    with pytest.raises(ConfigError, match="'nvidia' is registered by both this project and x:Y"):
        detect("nvidia")
    # Whoever is meant, another device is not.
    with pytest.raises(ConfigError, match="is registered by both"):
        detect()


def test_probing_imports_no_vendor_package_and_starts_no_process() -> None:
    program = """
import sys
seen = []
sys.addaudithook(
    lambda event, args: seen.append((event, str(args[0])))
    if event in ("import", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn",
                 "os.exec", "os.system")
    else None
)
from hardware.detection import availability, names
names()
listed = [name for event, name in seen if event == "import"]
assert "torch" not in listed, listed
answers = {name: availability(name) for name in names()}
import torch
assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()
vendor = {"torch_npu", "torch_mlu", "mindspeed", "intel_extension_for_pytorch", "acl"}
imported = sorted(vendor & {name.partition(".")[0] for event, name in seen if event == "import"})
started = [each for each in seen if each[0] != "import"]
print(imported, started, sorted(name for name, found in answers.items() if not found.reason))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] [] []"


def test_platforms_are_listed_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hardware.detection import create, names\n"
        "for name in names(): print(create(name).vendor_name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-len(BUILT_IN) :] == BUILT_IN
