"""The command line: light, and plain about errors."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from flows.commands import recipes
from flows.commands.cli import main
from infra import env


def test_help_imports_hardly_more_than_python_itself() -> None:
    command = ["-X", "importtime", "-m", "flows.commands.cli", "--help"]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, check=True
    )
    told = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in told}
    assert "flows" in imported
    assert not imported & {"pydantic", "prefect", "ray", "mlflow", "torch", "numpy"}
    assert len(told) < 300, "half as many, and what the next Python adds"


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


def test_an_argument_of_another_type_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "quickstart", "--seed", "abc"])
    assert ended.value.code == 2
    expected = "--seed: invalid int value: 'abc'; see `rlhf run --help`\n"
    assert capsys.readouterr().err == expected


def test_merge_says_what_a_checkpoint_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"CHECKPOINT: {tmp_path}/no is no directory")
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
    assert "1 to run, 7 likely to run" in " ".join(printed.split())
    assert not (home / "store/work").exists()
    assert not (home / "services").exists()


def test_bad_start_stage_is_refused_before_a_plan_or_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("RLHF_HOME", str(home))
    for label, line in (
        ("merge", "--from: got 'merge'; need every stage before it done, and preprocess is not; "),
        ("merg1", "--from: no 'merg1'; known: preprocess, "),
    ):
        assert main(["plan", "quickstart", "--from", label]) == 2
        planned = capsys.readouterr().err
        assert planned.startswith(line)
        assert main(["run", "quickstart", "--from", label]) == 2
        assert capsys.readouterr().err == planned
    assert not (home / "store/work").exists()
    assert not (home / "services").exists()


def test_broken_external_module_fails_only_a_plan_needing_it(tmp_path: Path) -> None:
    (tmp_path / "good_module.py").write_text(
        "from engines.config.plugins import register_plugin\n"
        "register_plugin('backend', 'good', 'json:loads')\n"
    )
    (tmp_path / "bad_module.py").write_text("1 / 0\n")

    def started(command: str, setting: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "flows.commands.cli", command, "quickstart", "--set", setting],
            capture_output=True, text=True, timeout=120, check=False,
            env=env.child_environment(
                PYTHONPATH=str(tmp_path), RLHF_HOME=str(tmp_path / "home"),
                RLHF_USE_EXTERNAL_MODULES="bad_module,good_module",
            ),
        )  # fmt: skip

    line = (
        "environment.RLHF_USE_EXTERNAL_MODULES: bad_module cannot be imported (ZeroDivisionError: "
        "division by zero); repair or install it, or remove it from the list\n"
    )
    for backend in ("fsdp2", "good"):
        ended = started("plan", f"training.backend={backend}")
        assert ended.returncode == 0, ended.stderr
        assert "1 to run" in " ".join(ended.stdout.split())
        assert ended.stderr.endswith(line)
        assert ended.stderr.count("\n") == 1
    for command in ("plan", "run"):
        ended = started(command, "training.backend=brought_by_bad_module")
        assert ended.returncode == 2
        assert ended.stderr.startswith("training.backend: no 'brought_by_bad_module'; known: ")
        assert ended.stderr.endswith(f"; {line}")
        assert ended.stderr.count("\n") == 1
    ended = started("run", "hardware.platform=brought_by_bad_module")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"{line}hardware.platform: no 'brought_by_bad_module'; known: ")


def test_a_full_disk_is_one_line_that_names_the_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(arguments: object) -> int:
        error = OSError(errno.ENOSPC, "No space left on device", "/store/work")
        error.add_note("rl_round_2")
        raise error

    monkeypatch.setattr(recipes, "main", full)
    assert main(["recipes"]) == 1
    line = "rl_round_2: /store/work is full; free space there, then the same command resumes"
    assert capsys.readouterr().err.splitlines() == [line]
