"""`rlhf up`: Prefect server, worker, Ray head and MLflow on this machine."""

import argparse
import sys

from flows.commands.automations import print_automations
from flows.commands.status import print_status
from infra import env
from infra.host.records import make_place
from infra.services import stack


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Start what does not run yet, say where it answers and how other shells reach it."""
    home = env.home()
    make_place(home, "RLHF_HOME", "name another")
    stack.up(home)
    print_status(home)
    api_url = stack.running_prefect_url(home)
    if api_url:
        sys.stdout.write("\n")
        print_automations(home, api_url)
    sys.stdout.write(
        f"\nexport PREFECT_API_URL={api_url}\n"
        f"export MLFLOW_TRACKING_URI={stack.running_mlflow_url(home)}\n"
    )
    return 0
