"""`rlhf engines`: which training engine runs where, what it can do, and how that is tested."""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from engines.config.backends import Tested
from engines.config.engine_matrix import HEADINGS, engine_matrix

MEANINGS = {
    Tested.CONTRACT: "contract tests on CPU process groups, in continuous integration",
    Tested.ENVIRONMENT: "the same, inside the backend's own environment",
    Tested.RANKS: "tests of its own on CPU process groups, in continuous integration",
    Tested.GPU: "a test under tests/gpu that needs an accelerator",
    Tested.CPU_TWIN: "the same code by the contract tests on CPU; not on the device itself",
    Tested.REGISTRY: "found, and says what it lacks; no such device was at hand",
}


def main(arguments: argparse.Namespace) -> int:
    """Print the matrix."""
    rows = list(engine_matrix(installed=True))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        return 0
    table = Table(*HEADINGS, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.cells())
    console = Console()
    console.print(table)
    console.print()
    for tested, meaning in MEANINGS.items():
        console.print(f"{tested.value}: {meaning}", highlight=False)
    return 0
