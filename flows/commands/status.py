"""`rlhf status`: the services that `rlhf up` started."""

import argparse
import sys
from pathlib import Path

from infra import env
from infra.services import stack


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Print each service; the exit code is 0 if all of them answer."""
    return 0 if print_status(env.home()) else 1


def print_status(home: Path) -> bool:
    """Print each service of a home; says whether all of them answer."""
    found = stack.status(home)
    for service in found:
        pid = f"pid {service.pid}" if service.pid else ""
        sys.stdout.write(f"{service.name:<8} {service.state:<7} {service.url or '':<28} {pid}\n")
    return all(service.state == "up" for service in found)
