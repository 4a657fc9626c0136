"""`rlhf up`: Prefect server, worker, Ray head and MLflow on this machine."""

import argparse

from flows.commands.status import print_status
from infra import env, services


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Start what does not run yet, and say where it answers."""
    services.up(env.home())
    print_status(env.home())
    return 0
