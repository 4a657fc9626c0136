"""What `rlhf doctor` says about plugins: found, broken, named twice, and by the variable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.cost.machines import machine_of
from flows.machine_survey import platform_of, survey_machine
from infra import env
from infra.errors import ConfigError, ServiceError
from infra.survey_report import SurveyReport

VARIABLE = "RLHF_USE_EXTERNAL_MODULES"


def install(site: Path, distribution: str, entries: str) -> None:
    """What pip leaves of a wheel that announces plugins."""
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlhf.plugins]\n{entries}")


def doctor(
    site: Path, home: Path, *options: str, **variables: str | None
) -> tuple[int, dict[str, list[str]]]:
    """Exit code, and by name of the check its status and details."""
    variables = {"PYTHONPATH": str(site), "RLHF_HOME": str(home), VARIABLE: None, **variables}
    ended = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "doctor", "--json", *options],
        capture_output=True, text=True, timeout=180, check=False,
        env=env.child_environment(RLHF_PLATFORM=None, **variables),
    )  # fmt: skip
    found: dict[str, list[str]] = {}
    for row in json.loads(ended.stdout)["checks"]:
        found.setdefault(row["name"], []).extend([row["status"], row["detail"]])
    return ended.returncode, found


def test_plugins_of_distributions(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "wheel_a_chip.py").write_text(
        "from hardware.cpu import CPUPlatform\n"
        "from hardware.base import Availability\n"
        "from infra.survey_report import DeviceFacts, FoundDevice\n"
        "class Chip(CPUPlatform):\n"
        "    vendor_name = 'a'\n"
        "    def total_memory_bytes(self): return 2**30\n"
        "    def device_facts(self):\n"
        "        return DeviceFacts(runtime='chips 1', driver=None, communication=None, links=None,"
        " devices=(FoundDevice(label='A', architecture='a1', total_bytes=2**30, free_bytes=0),))\n"
        "class Gone(Chip):\n"
        "    def is_available(self): return Availability(False, 'no chip on the bus')\n"
    )
    (site / "wheel_b_chip.py").write_text("print('noise')\nraise OSError('libb.so:\\n missing')\n")
    install(
        site,
        "wheel_a",
        "platform.chip = wheel_a_chip:Chip\nplatform.gone = wheel_a_chip:Gone\n"
        "backend.mine = json:loads\nrollout.transformers = json:loads\n",
    )
    install(site, "wheel_b", "platform.broken = wheel_b_chip:Chip\nbackend.mine = json:dumps\n")
    (site / "nvidia-smi").write_text("#!/bin/sh\necho 580.95.05\n")
    (site / "nvidia-smi").chmod(0o755)
    path, file = f"{site}:{os.environ['PATH']}", tmp_path / "own.json"
    code, found = doctor(site, tmp_path / "home", "--survey", str(file), PATH=path)
    assert code == 1
    assert found["survey"][0] == "ok"
    assert (machine_of(str(file)).platform, machine_of(str(file)).memory_bytes) == ("chip", 2**30)
    status, detail = found["platform"]
    assert status == "ok"
    assert "(chip: a CPU is always there (not broken: broken cannot be loaded from" in detail
    assert found["devices"] == ["ok", "driver unknown, chips 1"]
    assert found["device 0"] == ["ok", "A, a1, 1.0 GiB, 0.0 GiB free"]
    status, detail = found["environment core"]
    assert status == "warning" or "cpu" not in detail
    assert detail.endswith("driver 580.95.05 is here; run make DEVICE=cuda") or "cpu" not in detail
    assert found["plugin platform.chip"] == [
        "ok",
        "wheel_a==1.0, wheel_a_chip:Chip, available: a CPU is always there",
    ]
    status, detail = found["plugin platform.gone"]
    assert (status, detail.endswith("not available: no chip on the bus")) == ("ok", True)
    assert found["plugin platform.broken"] == [
        "error",
        "broken cannot be loaded from wheel_b_chip:Chip (OSError: libb.so: missing); repair or "
        "remove wheel_b==1.0",
    ]
    assert "error" in found["plugin backend.mine"]
    assert (
        "'mine' is registered by both wheel_a==1.0 and wheel_b==1.0; remove one"
        in (found["plugin backend.mine"])
    )
    assert "error" in found["plugin rollout.transformers"]
    assert found["backend fsdp2"][0] == "ok"
    assert found["storage"][0] == "ok"


def test_a_broken_external_module_is_said_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "bad_module.py").write_text("1 / 0\n")
    (site / "good_module.py").write_text(
        "from engines.config.plugins import register_plugin\n"
        "register_plugin('rollout', 'good', 'json:loads')\n"
    )
    code, found = doctor(site, tmp_path / "home", **{VARIABLE: "bad_module,good_module"})
    assert code == 1
    assert found["module good_module"] == ["ok", f"imported for {VARIABLE}"]
    assert found["module bad_module"] == [
        "error",
        f"environment.{VARIABLE}: bad_module cannot be imported (ZeroDivisionError: division by "
        "zero); repair or install it, or remove it from the list",
    ]
    errors = [name for name, row in found.items() if row[0] == "error"]
    assert errors == ["module bad_module"]
    assert found["plugin rollout.good"][0] == "ok"
    status, detail = found["platform"]
    assert status == "ok"
    assert "not what bad_module registers: ZeroDivisionError: division by zero" in detail


def test_the_probe_passes_on_what_the_registry_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLHF_PLATFORM", raising=False)
    with pytest.raises(ConfigError, match="hardware.platform: no 'nvidai'; known: .*, auto"):
        platform_of(survey_machine("nvidai"))
    with pytest.raises(ServiceError, match="gave no answer"):
        platform_of(SurveyReport())
