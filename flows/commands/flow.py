"""`rlhf flow`: run a flow from a Python file in this process.

It uses the same Prefect server as `rlhf run`.
"""

import argparse
import importlib
import sys
from typing import Any

from rich.console import Console

from flows.broken_modules import tell_broken_modules
from flows.local.embedded_prefect import prefect_server, use_prefect
from infra import env


def main(arguments: argparse.Namespace) -> int:
    """Run the flow and print its outcome."""
    home = env.home()
    tell_broken_modules()
    with prefect_server(home) as server:
        use_prefect(home, server.api_url, quiet=not arguments.debug)
        # Prefect reads these settings at import time.
        own_flow: Any = importlib.import_module("flows.local.local_run")
        own_flow.run_own_flow(arguments.flow, arguments.overrides, home, Console(), server)
    sys.stdout.flush()
    return 0
