"""`rlhf down`: end every server of this home."""

import argparse
import sys

from infra import env
from infra.services import stack


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Stop the servers of this home; the exit code is 1 if a living run keeps some of them."""
    ended, kept = stack.down(env.home())
    sys.stdout.write(f"stopped {', '.join(ended)}\n" if ended else "nothing to stop\n")
    for server in kept:
        pids = " ".join(map(str, server.users))
        sys.stdout.write(f"{server.name} stays: a run uses it; end that first (kill {pids})\n")
    return 1 if kept else 0
