"""`rlhf down`: end what `rlhf up` started, and nothing else."""

import argparse
import sys

from infra import env
from infra.services import stack


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Stop the services of this home."""
    stack.down(env.home())
    sys.stdout.write("stopped\n")
    return 0
