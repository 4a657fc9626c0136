"""A program is kept running, but not for ever."""

import sys
from pathlib import Path

import pytest

from infra.services.keeper import keep

PROGRAM = """
import os, sys, time
log, num_long = sys.argv[1], int(sys.argv[2])
time.sleep(0.5 if os.path.getsize(log) < num_long else 0)
open(log, "a").write("x")
sys.exit(7)
"""


@pytest.mark.parametrize(("num_long", "num_starts"), [(0, 3), (2, 4)])
def test_a_program_is_given_up_once_it_ends_too_often_without_having_settled(
    tmp_path: Path, num_long: int, num_starts: int, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "starts"
    log.touch()
    argv = [sys.executable, "-S", "-c", PROGRAM, str(log), str(num_long)]
    assert keep(argv, max_restarts=2, settled_s=0.5, pause_s=0.0) == 7
    assert len(log.read_text()) == num_starts
    assert "given up after 2 restarts" in capfd.readouterr().err
