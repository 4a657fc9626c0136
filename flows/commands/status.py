"""`rlhf status`: the services of `rlhf up`, and the servers of runs."""

import argparse
import sys
from pathlib import Path

from infra import env
from infra.services import stack


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Print each server; the exit code is 0 if all of them answer."""
    return 0 if print_status(env.home()) else 1


def print_status(home: Path) -> bool:
    """Print each server of a home; says whether all of them answer."""
    found = stack.status(home)
    for service in found:
        pid = f"pid {service.pid}" if service.pid else ""
        users = f"used by {', '.join(map(str, service.users))}" if service.users else ""
        line = f"{service.name:<16} {service.state:<8} {service.url or '':<28} {pid:<12} {users}"
        sys.stdout.write(f"{line.rstrip()}\n")
    return all(service.state == "up" for service in found)
