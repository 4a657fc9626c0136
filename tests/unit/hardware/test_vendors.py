"""What each platform declares, against what torch and Ray themselves say."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed import Backend
from torch.distributed.distributed_c10d import BackendConfig

from hardware.accelerator import AcceleratorPlatform
from hardware.amd import AMDPlatform
from hardware.base import PlatformBase
from hardware.cambricon import CambriconPlatform
from hardware.cpu import CPUPlatform
from hardware.detection import create
from hardware.huawei import HuaweiPlatform
from hardware.intel import IntelPlatform
from hardware.metax import MetaXPlatform
from hardware.nvidia import NvidiaPlatform
from hardware.platforms import PLATFORMS

ALL = (
    NvidiaPlatform,
    AMDPlatform,
    HuaweiPlatform,
    IntelPlatform,
    CambriconPlatform,
    MetaXPlatform,
    CPUPlatform,
)


def test_every_built_in_name_is_its_vendors() -> None:
    made = {row.name: create(row.name) for row in PLATFORMS.rows}
    assert {type(platform) for platform in made.values()} == set(ALL)
    assert all(name == platform.vendor_name for name, platform in made.items())


@pytest.mark.parametrize("vendor", ALL)
def test_replicas_alone_get_no_setting_of_communicators(vendor: type[PlatformBase]) -> None:
    """Ranks join the same communicators; both ends need equal settings."""
    assert not [name for name in vendor().rollout_env_vars() if "CCL_" in name]


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        (NvidiaPlatform(), ("cuda", "nccl", {"num_gpus": 2})),
        (AMDPlatform(), ("cuda", "nccl", {"num_gpus": 2})),
        (MetaXPlatform(), ("cuda", "nccl", {"num_gpus": 2})),
        (IntelPlatform(), ("xpu", "xccl", {"num_gpus": 2})),
        (HuaweiPlatform(), ("npu", "hccl", {"resources": {"NPU": 2}})),
        (CambriconPlatform(), ("mlu", "cncl", {"resources": {"MLU": 2}})),
        (CPUPlatform(), ("cpu", "gloo", {"num_cpus": 2})),
    ],
    ids=lambda value: getattr(value, "vendor_name", ""),
)
def test_device_collectives_and_ray_resources(
    platform: PlatformBase, expected: tuple[str, str, dict]
) -> None:
    found = (
        platform.device_name,
        platform.communication_backend,
        platform.ray_resource_options(2),
    )
    assert found == expected
    # torch takes one backend per device type, or one for all.
    device, backend = expected[:2]
    both = backend if device == "cpu" else f"cpu:gloo,{device}:{backend}"
    assert platform.process_group_backend == both
    assert set(BackendConfig(Backend(both)).get_device_backend_map()) >= {"cpu", device}


@pytest.mark.parametrize("platform", [cls() for cls in ALL], ids=lambda p: p.vendor_name)
def test_the_collectives_are_torchs_own_choice_where_it_has_one(platform: PlatformBase) -> None:
    chosen = Backend.default_device_backend_map.get(platform.device_name)
    assert chosen in (None, platform.communication_backend)
    assert (chosen is None) == (platform.device_name in ("npu", "mlu"))


@pytest.mark.parametrize(
    ("platform", "module"),
    [
        (NvidiaPlatform, "nvidia_gpu"),
        (AMDPlatform, "amd_gpu"),
        (IntelPlatform, "intel_gpu"),
        (HuaweiPlatform, "npu"),
        (MetaXPlatform, "metax_gpu"),
    ],
)
def test_ray_writes_the_variable_that_is_declared(
    platform: type[PlatformBase], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's accelerator manager is asked to hand out devices 4 and 6, with and without a veto."""
    accelerators = pytest.importorskip("ray._private.accelerators", reason="needs Ray")
    source = sys.modules[f"{accelerators.__name__}.{module}"]
    (manager,) = (
        value
        for name, value in vars(source).items()
        if name.endswith("Manager") and name != "AcceleratorManager"
    )
    for name in ("CUDA", "HIP", "ROCR", "ASCEND_RT"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    assert manager.get_resource_name() == platform.ray_resource
    variable, veto = platform.visible_devices_env, platform.ray_noset_env
    assert variable is not None
    assert veto is not None
    monkeypatch.setenv(variable, "0")  # restored behind the test, whatever Ray writes
    manager.set_current_process_visible_accelerator_ids(["4", "6"])
    assert manager.get_current_process_visible_accelerator_ids() == ["4", "6"]
    monkeypatch.setenv(veto, "1")
    manager.set_current_process_visible_accelerator_ids(["5"])
    assert manager.get_current_process_visible_accelerator_ids() == ["4", "6"]


def test_ray_knows_no_accelerator_where_none_is_declared() -> None:
    accelerators = pytest.importorskip("ray._private.accelerators", reason="needs Ray")
    assert CambriconPlatform.ray_noset_env is None
    names = accelerators.get_all_accelerator_resource_names()
    assert CambriconPlatform.ray_resource not in names
    assert HuaweiPlatform.ray_resource in names


# Published figures, written down a second time and by other roads where there is one:
# cores x FLOP per cycle and core x clock in GHz.
PEAKS = [
    # H100 and H200 SXM: 132 multiprocessors x 4096 dense bfloat16 FLOP per cycle x 1.83 GHz.
    (NvidiaPlatform, "NVIDIA H100 80GB HBM3", "bfloat16", 132 * 4096 * 1.83e9),
    (NvidiaPlatform, "NVIDIA H200", "bfloat16", 132 * 4096 * 1.83e9),
    (NvidiaPlatform, "NVIDIA H100 PCIe", "bfloat16", 114 * 4096 * 1.62e9),
    # A100: 108 x 2048 x 1.41 GHz; outside the tensor cores 108 x 128 x 1.41 GHz.
    (NvidiaPlatform, "NVIDIA A100-SXM4-80GB", "bfloat16", 108 * 2048 * 1.41e9),
    (NvidiaPlatform, "NVIDIA A100-SXM4-80GB", "float32", 108 * 128 * 1.41e9),
    # Ada with float32 accumulation: 142 x 1024 x 2.49 GHz (L40S), 128 x 512 x 2.52 GHz (4090).
    (NvidiaPlatform, "NVIDIA L40S", "bfloat16", 142 * 1024 * 2.49e9),
    (NvidiaPlatform, "NVIDIA GeForce RTX 4090", "bfloat16", 128 * 512 * 2.52e9),
    (NvidiaPlatform, "NVIDIA B200", "bfloat16", 4.5e15 / 2),
    # MI300X: 304 compute units x 2048 x 2.1 GHz; MI250X: 110 per die x 1024 x 1.7 GHz.
    (AMDPlatform, "AMD Instinct MI300X", "bfloat16", 304 * 2048 * 2.1e9),
    (AMDPlatform, "AMD Instinct MI250X", "bfloat16", 110 * 1024 * 1.7e9),
    (HuaweiPlatform, "Ascend910B2", "bfloat16", 24 * 8192 * 1.8e9),
    (HuaweiPlatform, "Ascend910B3", "float16", 20 * 8192 * 1.8e9),
    (IntelPlatform, "Intel(R) Data Center GPU Max 1100", "bfloat16", 56 * 4096 * 1.55e9),
]


@pytest.mark.parametrize(("platform", "label", "dtype", "flops"), PEAKS)
def test_peaks_follow_from_the_architecture(
    platform: type[AcceleratorPlatform],
    label: str,
    dtype: str,
    flops: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "device_label", lambda self: label)
    assert platform().peak_flops_per_s(dtype) == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(
    ("platform", "label", "dtype"),
    [
        (NvidiaPlatform, "NVIDIA RTX A4000", "bfloat16"),  # not an A40
        (NvidiaPlatform, "NVIDIA RTX A1000", "bfloat16"),  # not an A100
        (NvidiaPlatform, "NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        (NvidiaPlatform, "NVIDIA H100 80GB HBM3", "complex64"),
        (HuaweiPlatform, "Ascend910B3", "float32"),
        (MetaXPlatform, "MetaX C550", "bfloat16"),
    ],
)
def test_an_unknown_peak_is_none(
    platform: type[AcceleratorPlatform], label: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "device_label", lambda self: label)
    assert platform().peak_flops_per_s(dtype) is None


@pytest.mark.parametrize(
    ("versions", "here"),
    [
        ({"cuda": "13.0"}, "nvidia"),
        ({"hip": "7.0.2"}, "amd"),
        ({"maca": "3.8.1.0", "cuda": "11.6"}, "metax"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("rival", [NvidiaPlatform, AMDPlatform, MetaXPlatform])
def test_the_vendors_of_cuda_are_told_apart_by_torchs_build(
    versions: dict[str, str], here: str | None, rival: type[AcceleratorPlatform]
) -> None:
    build = ModuleType("torch")
    build.__dict__["version"] = SimpleNamespace(**versions)
    problem = rival().build_problem(build)
    assert (problem is None) == (rival.vendor_name == here)


def test_amd_says_what_ray_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(device_count=lambda: 2, is_available=lambda: True)
    monkeypatch.setattr(AMDPlatform, "device_module", module)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    found = AMDPlatform().is_available()
    assert not found.ok
    assert "set HIP_VISIBLE_DEVICES instead" in found.reason
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1")
    assert AMDPlatform().is_available().ok


def test_cpu_answers() -> None:
    platform = CPUPlatform()
    assert platform.device() == torch.device("cpu")
    assert 0 < platform.memory_allocated_bytes() <= platform.max_memory_allocated_bytes() * 1.05
    assert platform.peak_flops_per_s("float32") is None
    assert platform.device_uuid() is None
    with platform.library_scope("another library"):
        pass


def test_launch_order_is_for_megatron_alone() -> None:
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    nvidia = NvidiaPlatform()
    assert nvidia.training_env_vars("fsdp2") == segments
    assert nvidia.training_env_vars("megatron") == {**segments, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # vLLM's sleep refuses segments that grow.
    assert segments.keys().isdisjoint(nvidia.rollout_env_vars())


@pytest.mark.parametrize(
    ("platform", "properties", "expected"),
    [
        (NvidiaPlatform, {"major": 8, "minor": 0}, False),  # A100
        (NvidiaPlatform, {"major": 8, "minor": 9}, True),  # L40S
        (NvidiaPlatform, {"major": 9, "minor": 0}, True),  # H100
        (NvidiaPlatform, {"major": 10, "minor": 0}, True),  # B200
        (NvidiaPlatform, {"major": 12, "minor": 0}, True),  # RTX 5090
        (AMDPlatform, {"gcnArchName": "gfx90a:sramecc+:xnack-"}, False),  # MI250
        (AMDPlatform, {"gcnArchName": "gfx942:sramecc+:xnack-"}, True),  # MI300X
        (MetaXPlatform, {"major": 9, "minor": 0}, False),
    ],
)
def test_which_devices_multiply_8_bit_floats(
    platform: type[AcceleratorPlatform],
    properties: dict[str, object],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(**properties)
    )
    assert platform().supports_fp8() is expected
    assert CPUPlatform().supports_fp8()
