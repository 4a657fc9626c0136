"""`make` takes the lock of the device that it finds, or that it is told."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HAS_DRIVER = shutil.which("nvidia-smi") is not None
OF_MAKE = {"DEVICE", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}
"""Variables by which a `make` that runs this test would tell its device."""


def dry_run(tmp_path: Path, *arguments: str, dry: bool = True) -> subprocess.CompletedProcess[str]:
    """What `make` would do in a new environment; `tmp_path` comes first on PATH."""
    variables = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    return subprocess.run(
        ["make", *["--dry-run"] * dry, f"VENV={tmp_path / 'venv'}", *arguments],
        cwd=ROOT,
        env={**variables, "PATH": f"{tmp_path}:{variables['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_named_device_is_taken(tmp_path: Path, device: str) -> None:
    told = dry_run(tmp_path, f"DEVICE={device}", "quickstart").stdout
    assert f"--requirement infra/locks/{device}/core.lock" in told
    assert ("download.pytorch.org/whl/cpu" in told) is (device == "cpu")
    assert f"venv/.installed-{device}" in told


@pytest.mark.parametrize(("driver", "device"), [("580.65.06", "cuda"), ("535.104.05", "cpu")])
def test_the_driver_decides(tmp_path: Path, driver: str, device: str) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho {driver}\n", encoding="utf-8")
    command.chmod(0o755)
    told = dry_run(tmp_path, "quickstart")
    assert f"infra/locks/{device}/core.lock" in told.stdout
    assert ("CUDA 13 needs 580" in told.stderr) is (device == "cpu")


def test_an_environment_keeps_its_device(tmp_path: Path) -> None:
    """On a shared disk a node without a GPU would else take it from the nodes that have one."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed-cuda").touch()
    assert "infra/locks" not in dry_run(tmp_path, "quickstart").stdout
    told = dry_run(tmp_path, "DEVICE=cpu", "quickstart").stdout
    assert f"-m venv --clear {tmp_path / 'venv'}" in told


@pytest.mark.skipif(HAS_DRIVER, reason="needs a machine without an NVIDIA driver")
def test_without_a_driver_it_is_a_cpu(tmp_path: Path) -> None:
    assert "infra/locks/cpu/core.lock" in dry_run(tmp_path, "quickstart").stdout


def test_a_device_without_a_lock_is_refused(tmp_path: Path) -> None:
    ended = dry_run(tmp_path, "DEVICE=tpu", "quickstart", dry=False)
    assert ended.returncode == 2
    assert "DEVICE: got tpu" in ended.stderr
    assert not (tmp_path / "venv").exists()


def test_an_environment_of_jobs_has_the_lock_of_the_device(tmp_path: Path) -> None:
    told = dry_run(tmp_path, "DEVICE=cuda", "--always-make", "env-vllm").stdout
    assert "--no-deps --requirement infra/locks/cuda/vllm.lock" in told
