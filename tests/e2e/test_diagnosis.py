"""A round that had nothing to train on: the run ends by its name, or goes on without it."""

import sqlite3
from pathlib import Path

import pytest
from tiny_pipeline import Home, ran, settings

pytestmark = pytest.mark.stacks

# An untrained policy scores alike with every answer, so that no group is left.
DULL = (
    "rl.algorithm.filter_groups={enable: true, max_num_gen_batches: 1}",
    "diagnosis.window_num_steps=1",
)


def test_a_dull_round_ends_the_run_or_is_passed_over(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    ended = home.start("run", *settings(*DULL, "diagnosis.end_run=[no_signal]"))
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert "rl_round_1: no_signal: 100% of the last steps had nothing to train on" in said
    (page,) = (home.path / "runs").glob("*/diagnosis.html")
    assert "no_signal" in page.read_text()
    (told,) = (home.path / "runs").glob("*/diagnosis.md")
    assert "**no_signal** (sick), rl_round_1" in told.read_text()
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        assert ("diagnosis-tiny",) in database.execute("select key from artifact").fetchall()

    passed = settings(*DULL, "diagnosis.reject_round=[no_signal]")
    report = home.report(home.rlhf("run", *passed))
    assert ran(report) == ["merge", "evaluate", "promote"], "nothing is trained again"
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert stages["rl_round_1"]["rejected"].startswith("no_signal")
    assert home.rlhf("run", *passed).count("reused") >= len(stages), "and decided alike"
