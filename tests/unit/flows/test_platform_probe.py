"""The child process that is asked for this machine's accelerator."""

from pathlib import Path

import pytest

from flows.platform_probe import survey_machine


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
