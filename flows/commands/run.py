"""`rlhf run`: run a recipe, from raw data to a promoted model.

If `rlhf up` runs and the deployment is registered, its worker executes the run. Otherwise this
process does. It records the run at the configured Prefect server (PREFECT_API_URL, or the one of
`rlhf up`), or else at an embedded server that lives as long as the run.
"""

import argparse
import importlib
import sys
from typing import Any

from rich.console import Console

from flows.broken_modules import tell_broken_modules
from flows.local.embedded_prefect import prefect_server, use_prefect
from flows.plan import ask
from flows.preflight import preflight
from flows.recipe.recipe import Recipe, load_recipe
from flows.report.report import Report
from infra.services.stack import worker_api_url


def main(arguments: argparse.Namespace) -> int:
    """Run a recipe and print its outcome."""
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    run(recipe, Console(), arguments)
    sys.stdout.flush()
    return 0


def run(recipe: Recipe, console: Console, arguments: argparse.Namespace) -> Report:
    """Run a recipe in the worker or in this process, and print its outcome.

    Args:
        arguments: of a command, with `local`, `debug` and optionally `force`, `adopt` and
            `start_from`.

    Raises:
        ConfigError: the recipe or an argument is invalid.
    """
    force, adopt = getattr(arguments, "force", []), getattr(arguments, "adopt", [])
    start_from = getattr(arguments, "start_from", None)
    tell_broken_modules()
    recipe = preflight(recipe, dict.fromkeys(filter(None, (*force, start_from)), "look"))
    asked = ask(recipe, force, adopt, start_from)
    console.print(f"{recipe.run_name}, in {recipe.home}", highlight=False, soft_wrap=True)
    with prefect_server(recipe.home) as server:
        use_prefect(recipe.home, server.api_url, quiet=not arguments.debug)
        # Prefect reads these settings at import time.
        local_run: Any = importlib.import_module("flows.local.local_run")
        served_run: Any = importlib.import_module("flows.local.served_run")
        is_served = server.api_url == worker_api_url(recipe.home) and not arguments.local
        deployment = served_run.find_or_hint(console) if is_served else None
        if deployment is None:
            report = local_run.run_locally(asked, console, server)
        else:
            report = served_run.run_served(asked, deployment, console)
    local_run.print_outcome(report, recipe, server.api_url if server.lasting else None, console)
    return report
