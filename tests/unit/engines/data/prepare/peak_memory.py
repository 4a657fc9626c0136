"""What a Python program takes of memory at its largest."""

import subprocess
import sys
from collections.abc import Sequence

# A process of its own: what the kernel counts of a child begins with its parent's memory.
PROGRAM = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
raise SystemExit(done.returncode)
"""


def peak_bytes(arguments: Sequence[str], deadline_s: float) -> int:
    """Run Python to its end with these arguments; its largest resident set, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])
