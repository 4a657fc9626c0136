"""`rlhf down`: end what `rlhf up` started, and nothing else."""

import argparse
import sys

from infra import env, services


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Stop the services of this home."""
    services.down(env.home())
    sys.stdout.write("stopped\n")
    return 0
