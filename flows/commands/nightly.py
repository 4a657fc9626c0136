"""`rlhf nightly`: recompute recipes and judge each, or accept the last night as the baseline."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.local.embedded_prefect import prefect_server, use_prefect
from flows.nightly import night as nights
from infra import env


def main(arguments: argparse.Namespace) -> int:
    """Run a night, or accept the last one; the exit code is 1 if a recipe failed."""
    baselines = Path(arguments.baselines).absolute() if arguments.baselines else nights.BASELINES
    home = env.home()
    if arguments.accept:
        names = [recipe.name for recipe in nights.load_matrix(arguments.recipes)]
        for path in nights.accept(nights.last_night(home), names, baselines):
            sys.stdout.write(f"{path}\n")
        return 0
    nights.load_matrix(arguments.recipes)  # invalid recipes fail before a server starts
    console = Console()
    with prefect_server(home) as server:
        use_prefect(home, server.api_url, quiet=not arguments.debug)
        # Prefect reads these settings at import time.
        local_night: Any = importlib.import_module("flows.local.local_run")
        night = local_night.run_night(arguments.recipes, baselines, console, server)
    local_night.print_night(night, nights.nights_of(home) / night.name, console)
    sys.stdout.flush()
    return 1 if night.failed else 0
