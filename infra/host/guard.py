"""A thread that ends its server once no user is left, even if the users were killed.

`python -m infra.host.guard HOME NAME MODULE ARGUMENT...` runs a module under such a guard.
Promises: a server that is not persistent ends within `IDLE_S` plus the stop time after its last
user and its last work are gone, whatever ended them; so does one whose home was removed.
Does not promise: to end work that hangs. Its follower detects that; `rlhf down` ends everything.
"""

import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from infra import env
from infra.errors import PipelineError
from infra.host.processes import stop_all
from infra.host.servers import STOP_DEADLINE_S, ServerRecord, load, lock, stop

POLL_S = 2.0
IDLE_S = 6.0
"""Long enough that a run started right after another one reuses the server."""
_END = (
    "import sys; from pathlib import Path; from infra.host.guard import end_unneeded; "
    "end_unneeded(Path(sys.argv[1]), *sys.argv[2:])"
)


def start_guard(
    home: Path, name: str, is_busy: Callable[[ServerRecord], bool] = lambda record: False
) -> None:
    """Start a thread that ends this server once it is not persistent, not busy and has no users."""
    mark = env.RLHF_PROCESS_MARK.require()

    def watch() -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(POLL_S)
            try:
                record = load(home, name)
                if record and record.mark == mark and (record.is_needed or is_busy(record)):
                    idle_since = time.monotonic()
            except (PipelineError, OSError):
                # Do not end a working server because its record is unreadable.
                idle_since = time.monotonic()
            if time.monotonic() - idle_since >= IDLE_S:
                # A process outside this server's family, which the stop does not kill.
                subprocess.Popen(
                    [sys.executable, "-c", _END, str(home), name, mark],
                    env=env.child_environment(RLHF_PROCESS_MARK=None),
                    start_new_session=True,
                )
                idle_since = time.monotonic() + STOP_DEADLINE_S

    threading.Thread(target=watch, name="guard", daemon=True).start()


def end_unneeded(home: Path, name: str, mark: str) -> None:
    """End the server with this mark unless it has a new user; its home may be gone."""
    if home.is_dir():
        with lock(home, name):
            record = load(home, name)
            if record is not None and record.mark == mark:
                if not record.is_needed:
                    stop(home, record)
                return
    stop_all([], STOP_DEADLINE_S, marks=[mark])


def main() -> None:
    """Run a module under guard."""
    home, name, module = sys.argv[1:4]
    start_guard(Path(home), name)
    sys.argv = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
