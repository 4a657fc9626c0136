"""Processes that hang say where, each for itself."""

import signal
import subprocess
import sys
from pathlib import Path

from infra import env
from infra.host.stacks import ask_for_stacks
from infra.waiting import wait_for

HANGS = """
import sys, threading, time
from pathlib import Path
from infra.host.stacks import leave_stacks_on_signal
path = Path(sys.argv[1])
leave_stacks_on_signal(path.open("a"), path)

def waits_for_nobody():
    time.sleep(600)

threading.Thread(target=waits_for_nobody, daemon=True).start()
sum(1 for _ in iter(int, 1))  # never gives the interpreter back for long
"""


def test_each_process_under_a_directory_reports_stacks_or_status(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / "ranks" / f"rank-{rank}.log" for rank in range(3)]
    logs[0].parent.mkdir()
    argv = [sys.executable, "-c", HANGS]
    started = [subprocess.Popen([*argv, str(log)], env=env.child_environment()) for log in logs]
    try:
        for log in logs:
            mark = log.with_suffix(".process")
            wait_for(lambda mark=mark: mark.exists() and mark.read_text(), str(mark), 60.0)
        started[1].send_signal(signal.SIGSTOP)
        started[2].kill()
        started[2].wait(timeout=60)
        said = ask_for_stacks(tmp_path)
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=60)
    first, second, third = said.split("rank-")[1:]
    assert "in waits_for_nobody" in first
    assert "Thread" in first
    assert "in waits_for_nobody" in logs[0].read_text()
    assert second == "1:\nit does not answer; State: T (stopped)\n"
    assert third == "2:\nit has ended, or runs on another machine\n"


def test_where_nobody_logs_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert ask_for_stacks(tmp_path) == ""
