"""Keeps a program running: starts it again when it ends, up to `MAX_RESTARTS` times in a row.

`python -m infra.services.keeper PROGRAM ARGUMENT...` is the process in the server's record; the
program shares its session and mark, so `rlhf down` ends both. If the keeper is killed, the program
runs on without restarts until `rlhf up` or `rlhf down` ends the family. Nothing heavy is imported,
because the OOM killer prefers large processes.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

MAX_RESTARTS = 5
SETTLED_S = 600.0
PAUSE_S = 1.0
"""Pause before the first restart; it grows by this much with each further one."""


def keep(
    argv: Sequence[str],
    *,
    max_restarts: int = MAX_RESTARTS,
    settled_s: float = SETTLED_S,
    pause_s: float = PAUSE_S,
) -> int:
    """Run a program until it has ended `max_restarts` + 1 times in a row; return its exit code.

    A run of at least `settled_s` resets that count. A negative code is the signal that ended it.
    """
    num_restarts = 0
    while True:
        started = time.monotonic()
        code = subprocess.call(argv)  # no deadline: a service runs for ever
        if time.monotonic() - started >= settled_s:
            num_restarts = 0
        if num_restarts == max_restarts:
            sys.stderr.write(f"ended with code {code}; given up after {max_restarts} restarts\n")
            return code
        num_restarts += 1
        sys.stderr.write(f"ended with code {code}; restart {num_restarts} of {max_restarts}\n")
        time.sleep(pause_s * num_restarts)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
