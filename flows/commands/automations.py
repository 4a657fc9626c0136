"""`rlhf automations`: a Prefect server picks up runs whose process was killed.

`rlhf up` does the same for its own server.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from flows.local.embedded_prefect import check_answers, use_prefect
from infra import env
from infra.errors import ConfigError
from infra.services.stack import running_prefect_url


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Create or repair the automations of the configured server, else of that of `rlhf up`."""
    home = env.home()
    api_url = env.PREFECT_API_URL.get() or running_prefect_url(home)
    if api_url is None:
        raise ConfigError(
            f"environment.{env.PREFECT_API_URL.name}",
            f"not set, and no server of `rlhf up` runs in {home}; need the address of a Prefect "
            "server; export it, or run `rlhf up`",
        )
    check_answers(api_url)
    print_automations(home, api_url)
    return 0


def print_automations(home: Path, api_url: str) -> None:
    """Create or repair the automations of a server, and print each.

    Args:
        home: of the services.
        api_url: of the server.
    """
    use_prefect(home, api_url, quiet=True)
    # Prefect reads those settings when it is imported: not before now.
    automations: Any = importlib.import_module("flows.automations")
    for each in automations.apply_automations():
        change = each.change if each.enabled else f"{each.change}, paused"
        sys.stdout.write(f"{each.name:<27} {change:<18} {each.description}\n")
