"""`rlhf up`, `rlhf down`, `rlhf status`: Prefect, its worker, the Ray head and MLflow of a home.

`rlhf automations` makes a Prefect server restart runs whose process was killed. `rlhf up` does so
for its own server.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from flows.local.embedded_prefect import check_answers, use_prefect
from infra import env
from infra.errors import ConfigError
from infra.host.records import make_place
from infra.services import stack


def up(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Start the missing servers, and print their addresses and how other shells reach them."""
    home = env.home()
    make_place(home, "RLHF_HOME", "name another")
    stack.up(home)
    print_servers(home)
    api_url = stack.running_url(home, "prefect")
    if api_url:
        sys.stdout.write("\n")
        print_automations(home, api_url)
    sys.stdout.write(
        f"\nexport PREFECT_API_URL={api_url}\n"
        f"export MLFLOW_TRACKING_URI={stack.running_url(home, 'mlflow')}\n"
    )
    return 0


def down(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (the same)
    """Stop the servers of this home; the exit code is 1 if a live run still uses one of them."""
    ended, kept = stack.down(env.home())
    sys.stdout.write(f"stopped {', '.join(ended)}\n" if ended else "nothing to stop\n")
    for server in kept:
        pids = " ".join(map(str, server.users))
        sys.stdout.write(f"{server.name} stays: a run uses it; end that first (kill {pids})\n")
    return 1 if kept else 0


def status(arguments: argparse.Namespace) -> int:
    """Print the servers and the stages held by a job; the exit code is 0 if all servers answer."""
    home = env.home()
    all_up = print_servers(home)
    sys.stdout.writelines(
        f"{line}\n" for line in stack.held_stages(arguments.store or home / "store")
    )
    return 0 if all_up else 1


def print_servers(home: Path) -> bool:
    """Print each server of a home; return True if all of them answer."""
    found = stack.status(home)
    for service in found:
        pid = f"pid {service.pid}" if service.pid else ""
        users = f"used by {', '.join(map(str, service.users))}" if service.users else ""
        line = f"{service.name:<16} {service.state:<8} {service.url or '':<28} {pid:<12} {users}"
        sys.stdout.write(f"{line.rstrip()}\n")
    return all(service.state == "up" for service in found)


def automations(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (the same)
    """Create or repair the automations of the configured server, else of the one of `rlhf up`."""
    home = env.home()
    api_url = env.PREFECT_API_URL.get() or stack.running_url(home, "prefect")
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
    """Create or repair the automations of a server, and print each."""
    use_prefect(home, api_url, quiet=True)
    # Prefect reads these settings at import time.
    module: Any = importlib.import_module("flows.automations")
    for each, change in module.apply_automations():
        told = change if each.enabled else f"{change}, paused"
        sys.stdout.write(f"{each.name:<27} {told:<18} {each.description}\n")
