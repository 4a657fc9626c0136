"""Keeps a program running: starts it again when it ended, however it ended.

`python -m infra.services.keeper PROGRAM ARGUMENT...` is the process that a record names; the
program is of its family, by session and mark, and so ends with it in `rlhf down`.
Promises: a program that ends is back within seconds; one that ends `MAX_RESTARTS` times without
having run for `SETTLED_S` in between is given up, and its keeper ends with its exit code.
Does not promise: to end the program when it is killed itself. That runs on, unwatched, until
`rlhf up` or `rlhf down` end the family. Nothing heavy is imported: what has little memory is not
what a machine that runs out of memory kills first.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

MAX_RESTARTS = 5
SETTLED_S = 600.0
PAUSE_S = 1.0
"""Before the first restart; each further one waits for one more of it."""


def keep(
    argv: Sequence[str],
    *,
    max_restarts: int = MAX_RESTARTS,
    settled_s: float = SETTLED_S,
    pause_s: float = PAUSE_S,
) -> int:
    """Run a program, again and again.

    Args:
        argv: program and arguments.
        max_restarts: in a row.
        settled_s: who ran for so long begins a new row.
        pause_s: before the first restart of a row.

    Returns:
        Its exit code when it was given up; negative: the signal that ended it.
    """
    num_restarts = 0
    while True:
        started = time.monotonic()
        code = subprocess.call(argv)  # without a deadline: a service has none
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
