"""`rlhf gc` on the store of a real pipeline."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_pipeline import Home

from infra.garbage import DAY_S


def make_older(home: Home, days: float) -> None:
    at = time.time() - days * DAY_S
    for path in (home.path / "store").rglob("*"):
        os.utime(path, (at, at), follow_symlinks=False)


def gc(home: Home, *arguments: str) -> dict:
    """What the command says, for machines."""
    ended = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "gc", "--json", *arguments],
        capture_output=True,
        text=True,
        env=home.environment,
        timeout=home.deadline_s,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.stacks
def test_all_but_the_promoted_model_goes_and_comes_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    first = home.run()
    young = gc(home, "--delete")
    assert (young["stages"], young["artifacts"], young["freed_bytes"]) == ([], [], 0)
    make_older(home, 40)
    shown = gc(home)
    assert not shown["deleted"]
    assert list(shown["needed"].values()) == ["registered as tiny@champion"]
    went = gc(home, "--delete")
    assert went["freed_bytes"] == shown["freed_bytes"] > 0.5 * young["total_bytes"]
    assert {stage["name"] for stage in went["stages"]} == {
        "preprocess", "sft", "rl_round", "answers", "evaluate", "promote",
    }  # fmt: skip
    assert gc(home)["total_bytes"] == went["total_bytes"] - went["freed_bytes"]
    second = home.run()
    assert [stage["digest"] for stage in second["stages"]] == [
        stage["digest"] for stage in first["stages"]
    ]
    assert [stage["name"] for stage in second["stages"] if stage["reused"]] == ["merge"]
