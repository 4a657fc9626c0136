"""The command line: fast, and plain about errors."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.cli import main


def test_help_comes_within_a_second() -> None:
    seconds = []
    for _ in range(2):
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "flows.cli", "--help"], capture_output=True, timeout=60
        )
        seconds.append(time.monotonic() - started)
        assert ended.returncode == 0
    assert min(seconds) < 1.0


def test_recipes_lists_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert "quickstart\n    The whole pipeline on two CPU cores" in printed
    assert "gsm8k_qwen2.5_0.5b\n" in printed


def test_an_unknown_recipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstrat"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("recipe: no 'quickstrat'; known: ")
    assert captured.err.endswith("did you mean quickstart?\n")


def test_merge_says_what_a_checkpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"CHECKPOINT: {tmp_path}/no does not exist")
    assert main(["merge", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "need a policy below <home>/store/artifacts/policy" in capsys.readouterr().err


def test_plan_submits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("RLHF_HOME", str(home))
    assert main(["plan", "quickstart", "--set", "rl.num_rounds=1"]) == 0
    printed = capsys.readouterr().out
    assert "preprocess" in printed
    assert "1 to run, 5 known once" in " ".join(printed.split())
    assert not (home / "work").exists()
    assert not (home / "services").exists()
