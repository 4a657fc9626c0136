"""Opens the embedded MLflow of a home in a row of processes, each killed at a statement of SQL.

    python mlflow_ends.py HOME COUNT COUNT ...

Each is a fork of this one, which has loaded MLflow, and kills itself before its COUNT-th statement;
0 is never killed. Prints one exit status a line, negative by signal.
"""

import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
from sqlalchemy import Engine, event

from infra.tracking.mlflow_tracker import MlflowTracker
from infra.tracking.tracker import TrackedRun, TrackerSettings


def open_tracker(home: Path, killed_at: int) -> None:
    """What the shipper does first; one line for a failure."""
    statements: Iterator[int] = count(1)

    def counted(*_: Any) -> None:
        if next(statements) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", counted)
    tracker = MlflowTracker(TrackerSettings(home, f"sqlite:///{home}/mlflow.db"))
    tracker.origin()
    tracker.open_run(TrackedRun("k" * 8, "run"))


def in_a_fork(home: Path, killed_at: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            open_tracker(home, killed_at)
            status = 0
        except Exception as error:  # noqa: BLE001  the parent prints the status
            sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}\n")
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for at in sys.argv[2:]:
        print(in_a_fork(Path(sys.argv[1]), int(at)), flush=True)
