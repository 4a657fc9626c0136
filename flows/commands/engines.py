"""`rlhf engines`: training engines, where each runs and how that is tested; rollout engines."""

import argparse
import json
import sys
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from engines.config.backends import Tested
from flows.broken_modules import tell_broken_modules
from flows.report.engine_matrix import (
    HEADINGS,
    OUTSIDE,
    ROLLOUT_HEADINGS,
    MatrixRow,
    RolloutMatrixRow,
    engine_matrix,
    rollout_matrix,
)

PIPE_WIDTH = 240
"""Columns of output that is not a terminal, so that nothing is cut."""
MEANINGS = {
    Tested.CONTRACT.value: "contract tests on CPU process groups, in continuous integration",
    Tested.ENVIRONMENT.value: "the same, inside the backend's own environment",
    Tested.RANKS.value: "tests of its own on CPU process groups, in continuous integration",
    Tested.GPU.value: "a test under tests/gpu that needs an accelerator",
    Tested.CPU_TWIN.value: "the same code by the contract tests on CPU; not on the device itself",
    Tested.REGISTRY.value: "found, and says what it lacks; no such device was at hand",
    OUTSIDE: "brought by another package, which answers for it",
}


def main(arguments: argparse.Namespace) -> int:
    """Print both tables; name external modules that cannot be imported on stderr."""
    rows, engines = list(engine_matrix(installed=True)), list(rollout_matrix(installed=True))
    if arguments.json:
        tables = {"training": rows, "rollout": engines}
        plain = {name: [asdict(row) for row in table] for name, table in tables.items()}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH)
        _print_table(console, rows)
        _print_rollout_engines(console, engines)
    tell_broken_modules()
    return 0


def _print_rollout_engines(console: Console, engines: list[RolloutMatrixRow]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ROLLOUT_HEADINGS:
        table.add_column(heading, overflow="fold")
    for engine in engines:
        table.add_row(*engine.cells())
    console.print()
    console.print(table)


def _print_table(console: Console, rows: list[MatrixRow]) -> None:
    shown = folded(rows)
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS[:-1]:
        table.add_column(heading, overflow="fold")
    above = ""
    for row in shown:
        backend = "" if row.backend == above else row.backend
        table.add_row(backend, *row.cells()[1:-1])
        above = row.backend
    console.print(table)
    console.print()
    for line in dict.fromkeys(f"{row.backend}: {row.needs}" for row in shown if row.needs):
        console.print(line, highlight=False)
    console.print()
    for how, meaning in MEANINGS.items():
        console.print(f"{how}: {meaning}", highlight=False)


def folded(rows: list[MatrixRow]) -> list[MatrixRow]:
    """Join rows that differ only in the model type; the joined `model_type` lists all of them."""
    groups: dict[MatrixRow, list[str]] = {}
    for row in rows:
        groups.setdefault(replace(row, model_type=""), []).append(row.model_type)
    return [replace(row, model_type=", ".join(types)) for row, types in groups.items()]
