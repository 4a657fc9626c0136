"""A program is kept running, but not for ever."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.services import keeper
from infra.services.keeper import keep

PROGRAM = """
import sys
log, num_long = sys.argv[1], int(sys.argv[2])
open(log, "a").write("long " if len(open(log).read().split()) < num_long else "short ")
sys.exit(7)
"""


@pytest.mark.parametrize(("num_long", "num_starts"), [(0, 3), (2, 4)])
def test_program_ending_too_often_unsettled_is_given_up(
    tmp_path: Path,
    num_long: int,
    num_starts: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, pauses_s = tmp_path / "starts", list[float]()

    def monotonic() -> float:
        """A long run takes two minutes, a short one a second."""
        runs = log.read_text().split()
        return sum(120.0 if run == "long" else 1.0 for run in runs)

    clock = SimpleNamespace(monotonic=monotonic, sleep=pauses_s.append)
    monkeypatch.setattr(keeper, "time", clock)
    log.touch()
    argv = [sys.executable, "-S", "-c", PROGRAM, str(log), str(num_long)]
    assert keep(argv, max_restarts=2, settled_s=60.0, pause_s=1.0) == 7
    assert len(log.read_text().split()) == num_starts
    assert pauses_s == [1.0] * (num_starts - 2) + [2.0]
    assert "given up after 2 restarts" in capfd.readouterr().err
