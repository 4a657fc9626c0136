"""Lines of `rlhf doctor` on devices and environments."""

from pathlib import Path

import psutil
import pytest

from engines.cost.machines import machine_of
from flows.commands import device_checks
from flows.commands.check import Check
from infra import job_environments
from infra.errors import ConfigError
from infra.job_environments import EnvironmentBuild
from infra.survey_report import DeviceFacts, FoundDevice, FoundPlatform

FACTS = DeviceFacts(
    runtime="CUDA 13.0",
    driver="580.95.05",
    communication="NCCL 2.29.7",
    links="1 x NV18",
    devices=(
        FoundDevice(
            label="NVIDIA H200", architecture="sm_90", total_bytes=140 << 30, free_bytes=9 << 29
        ),
        FoundDevice(label="Chip", architecture=None, total_bytes=1 << 30, free_bytes=None),
    ),
)


def put_environment(root: Path, name: str, versions: str, *distributions: str) -> None:
    site = root / name / "lib" / "python3.11" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(versions)
    for distribution in distributions:
        info = site / f"{distribution}.dist-info"
        info.mkdir()
        own, _, version = distribution.partition("-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {own}\nVersion: {version}\n")
    (root / name / "bin").mkdir()
    (root / name / "bin" / "python").touch()


def test_each_device_has_a_line() -> None:
    assert [check.detail for check in device_checks.device_checks(FACTS)] == [
        "driver 580.95.05, CUDA 13.0, NCCL 2.29.7, links 1 x NV18",
        "NVIDIA H200, sm_90, 140.0 GiB, 4.5 GiB free",
        "Chip, architecture unknown, 1.0 GiB",
    ]
    assert list(device_checks.device_checks(None)) == [Check("devices", "ok", "none but the CPU")]


def test_environment_for_another_device_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_environments, "ENVIRONMENTS_DIR", tmp_path)
    for_cuda = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    for_cpu = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    put_environment(tmp_path, "vllm", for_cuda, "vllm-0.32.0", "nvidia_nccl_cu13-2.29.7", "x-1")
    put_environment(tmp_path, "sglang", for_cpu, "sglang_cpu-0.5.23")
    put_environment(tmp_path, "empty", for_cpu)
    (tmp_path / "empty" / "lib/python3.11/site-packages/torch/version.py").unlink()
    own = EnvironmentBuild("2.13.0", "CUDA", "13.0", ())
    monkeypatch.setattr(device_checks, "_own_build", lambda: own)
    assert list(device_checks.environment_checks("580.95.05")) == [
        Check("environment core", "ok", "torch 2.13.0 for CUDA 13.0"),
        Check("environment empty", "warning", "has no torch; run make env-empty"),
        Check(
            "environment sglang",
            "warning",
            "torch 2.13.0+cpu for cpu, sglang-cpu 0.5.23; the project's own is for CUDA; run make "
            "DEVICE=cuda env-sglang",
        ),
        Check("environment vllm", "ok", "torch 2.13.0 for CUDA 13.0, NCCL 2.29.7, vllm 0.32.0"),
    ]


@pytest.mark.parametrize(
    ("driver", "status", "end"),
    [
        (None, "ok", "torch 2.13.0+cpu for cpu"),
        ("580.95.05", "warning", "NVIDIA driver 580.95.05 is here; run make DEVICE=cuda"),
        ("535.1", "warning", "NVIDIA driver 535.1 is here; CUDA 13 needs driver 580"),
    ],
)
def test_torch_for_the_cpu_beside_a_driver_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str | None, status: str, end: str
) -> None:
    monkeypatch.setattr(job_environments, "ENVIRONMENTS_DIR", tmp_path)
    own = EnvironmentBuild("2.13.0+cpu", "cpu", "", ())
    monkeypatch.setattr(device_checks, "_own_build", lambda: own)
    (check,) = device_checks.environment_checks(driver)
    assert check.status == status
    assert check.detail.endswith(end)


def test_a_plan_reads_the_machine_that_was_surveyed(tmp_path: Path) -> None:
    found = FoundPlatform(
        name="nvidia", device="cuda", reason="", label="NVIDIA H200", num_devices=2,
        memory_bytes=150 * 10**9,
    )  # fmt: skip
    file = tmp_path / "own.json"
    assert device_checks.write_survey(found, file).startswith(f"{file} describes NVIDIA H200x2")
    machine = machine_of(str(file))
    assert (machine.platform, machine.num_devices) == ("nvidia", 2)
    assert machine.memory_bytes == 150 * 10**9
    assert machine.memory_bytes_per_s == machine_of("h200x1").memory_bytes_per_s
    assert machine.host_memory_bytes == psutil.virtual_memory().total
    with pytest.raises(ConfigError, match=r"--survey: got .*; need an accelerator"):
        device_checks.write_survey(found.model_copy(update={"memory_bytes": None}), file)
