"""The child process that is asked for this machine's accelerator, and when it is."""

from pathlib import Path
from platform import machine

import pytest

import flows.machine_survey as platform_probe
from engines.config.training import HardwareConfig
from flows.machine_survey import resolve_hardware, survey_machine
from infra.errors import ConfigError
from infra.survey_report import SurveyReport


def test_the_current_directory_is_no_place_to_import_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "__init__.py").write_text("raise SystemExit(9)\n")
    left = tmp_path / "left_behind.egg-info"
    left.mkdir()
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: left-behind\nVersion: 1\n")
    (left / "entry_points.txt").write_text("[rlhf.plugins]\nplatform.left = left:Behind\n")
    monkeypatch.chdir(tmp_path)
    report = survey_machine()
    assert report.platform is not None
    assert "left" not in report.model_dump_json()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the machine was asked, which answers as it does."""
    asked: list[tuple[str, ...]] = []

    def ask(*requested: str) -> SurveyReport:
        asked.append(requested)
        return survey_machine(*requested)

    monkeypatch.setattr(platform_probe, "survey_machine", ask)
    for name in ("RLHF_PLATFORM", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_a_machine_is_asked_once_per_boot_and_choice_of_devices(
    tmp_path: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, home = HardwareConfig(platform="cpu"), tmp_path / "home"
    found = HardwareConfig(platform="cpu", device_kind=machine())
    assert resolve_hardware(cpu, home) == resolve_hardware(cpu, home) == found
    assert asked == [("cpu",)]
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "1")
    assert resolve_hardware(cpu, home) == found
    monkeypatch.setattr(platform_probe, "_BOOT_ID", tmp_path / "another")
    assert resolve_hardware(cpu, home) == found
    assert asked == [("cpu",)] * 3
    with pytest.raises(ConfigError, match=r"hardware\.device_kind: got .vax.; .* here; remove it"):
        resolve_hardware(HardwareConfig(device_kind="vax"), home)


def test_an_order_of_the_environment_is_what_counts(
    tmp_path: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = HardwareConfig(platform="nvidia", device_kind="NVIDIA H100")
    assert resolve_hardware(stated, tmp_path) == stated
    assert asked == []
    monkeypatch.setenv("RLHF_PLATFORM", "cpu")
    found = resolve_hardware(HardwareConfig(), tmp_path)
    assert found == HardwareConfig(platform="cpu", device_kind=machine())


def test_another_machines_devices_are_named_by_the_recipe(
    tmp_path: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265")
    for hardware in (HardwareConfig(), HardwareConfig(platform="nvidia")):
        with pytest.raises(ConfigError, match=r"^hardware\.device_kind: missing, .* set it and"):
            resolve_hardware(hardware, tmp_path)
    stated = HardwareConfig(platform="nvidia", device_kind="NVIDIA H100")
    assert resolve_hardware(stated, tmp_path) == stated
    with pytest.raises(ConfigError, match=r"hardware\.platform: no 'nvidai'"):
        resolve_hardware(HardwareConfig(platform="nvidai", device_kind="x"), tmp_path)
    assert asked == []


def test_a_head_does_not_answer_for_other_nodes(
    tmp_path: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without an accelerator would choose the CPU for ranks that have one."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setattr(platform_probe, "num_nodes", lambda api: 2)
    with pytest.raises(ConfigError, match=r"hardware\.device_kind: missing"):
        resolve_hardware(HardwareConfig(), tmp_path / "home")
    assert asked == []
    monkeypatch.setattr(platform_probe, "num_nodes", lambda api: 1)
    assert resolve_hardware(HardwareConfig(platform="cpu"), tmp_path / "home").device_kind
