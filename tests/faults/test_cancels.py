"""Ctrl-C at random moments of a run: nothing of it is left, and the next run goes on at once.

Nor does MLflow show a run that goes on.

The moments are drawn from a seed, over all of a run that is never interrupted: the start of its
servers, every stage, its end. `NUM_CANCELS` says how many.
"""

import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import Home, settings

from infra.host import servers
from infra.services.stack import down
from infra.waiting import wait_for

pytestmark = [pytest.mark.stacks, pytest.mark.exclusive]

NUM_CANCELS = int(os.environ.get("NUM_CANCELS", "10"))
LEFT_S = 120.0
ENDS_S = 240.0
RUN = settings("sft.num_steps=20", "rl.num_steps_per_round=4", "checkpoint.every_num_steps=2")


def states(home: Home) -> set[str]:
    """Of all runs and stages, as MLflow has them."""
    if not (home.path / "mlflow.db").exists():
        return set()
    with sqlite3.connect(home.path / "mlflow.db") as database:
        has = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone()
        rows = database.execute("SELECT status FROM runs").fetchall() if has else []
    return {status for (status,) in rows}


def test_fault_row_20_run_cancelled_at_any_moment_leaves_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    drawn = random.Random(0)
    home = Home(tmp_path / "whole")
    started = time.monotonic()
    expected = home.report(home.rlhf("run", *RUN))
    whole_s = time.monotonic() - started
    home, round_of_run, num_cancels = Home(tmp_path / "cancelled"), 0, 0
    try:
        while num_cancels < NUM_CANCELS:
            with (tmp_path / "out").open("wb") as out:
                run = subprocess.Popen(
                    home.command("run", *RUN, "--seed", str(round_of_run)),
                    stdout=out,
                    stderr=out,
                    env=home.environment,
                )
            wait_for(lambda: " in /" in (tmp_path / "out").read_text(), "its first line", ENDS_S)
            try:
                assert run.wait(drawn.uniform(0.0, whole_s)) == 0
                round_of_run += 1  # it came to its end: another is cancelled
                continue
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGINT)
            code = run.wait(ENDS_S)
            printed = (tmp_path / "out").read_text()
            assert code in (130, 0), printed
            assert "Traceback" not in printed
            wait_for(lambda: not home.processes(), "the last process", LEFT_S)
            assert servers.recorded(home.path) == []
            assert states(home) <= {"FINISHED", "KILLED"}
            num_cancels += 1
        record_property("F5", num_cancels)
        report = home.report(home.rlhf("run", *RUN, "--seed", "0"))
        found, wanted = (
            [(stage["name"], stage["digest"]) for stage in each["stages"]]
            for each in (report, expected)
        )
        assert found == wanted
    finally:
        down(home.path)
