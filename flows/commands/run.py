"""`rlhf run`: a recipe, from raw data to a promoted model, in this process.

With a Prefect server (PREFECT_API_URL, or the one of `rlhf up`) the run is recorded there;
without one, a server of our own records it for as long as the run takes.
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.broken_modules import tell_broken_modules
from flows.local.embedded_prefect import check_answers, embedded_prefect, use_prefect
from flows.preflight import preflight
from flows.recipe.recipe import load_recipe
from infra import env
from infra.services.stack import running_prefect_url


@dataclass(frozen=True)
class PrefectServer:
    """The server of a run.

    Attributes:
        api_url: where it answers.
        wait: returns when it answers.
        lasting: whether it is there after the run.
    """

    api_url: str
    wait: Callable[[], None]
    lasting: bool


def main(arguments: argparse.Namespace) -> int:
    """Run a recipe and print what came out."""
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    tell_broken_modules()
    preflight(recipe)
    console = Console()
    console.print(f"{recipe.run_name}, in {recipe.home}", highlight=False, soft_wrap=True)
    with prefect_server(recipe.home) as server:
        use_prefect(recipe.home, server.api_url, quiet=not arguments.debug)
        # Prefect reads those settings when it is imported: not before now.
        local_run: Any = importlib.import_module("flows.local.local_run")
        report = local_run.run_locally(recipe, arguments.force, console, server.wait)
    local_run.print_outcome(report, recipe, server.api_url if server.lasting else None, console)
    sys.stdout.flush()
    return 0


@contextlib.contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """The configured server, else the one of `rlhf up`, else one for this run.

    Args:
        home: where the services of `rlhf up` are recorded.

    Yields:
        PrefectServer: the server; one for this run only may not answer yet.
    """
    api_url = env.PREFECT_API_URL.get() or running_prefect_url(home)
    if api_url:
        check_answers(api_url)
        yield PrefectServer(api_url, wait=lambda: None, lasting=True)
        return
    with embedded_prefect(home) as embedded:
        yield PrefectServer(embedded.api_url, wait=embedded.wait, lasting=False)
