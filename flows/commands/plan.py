"""`rlhf plan`: what a run would do."""

import argparse
import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from flows.broken_modules import tell_broken_modules
from flows.plan import PlannedStage, Planner
from flows.preflight import preflight
from flows.recipe.recipe import load_recipe
from flows.run.registry import Registry
from flows.stage_order import run_stages
from infra.store.storage import open_storage

DIGITS = 12


def main(arguments: argparse.Namespace) -> int:
    """Look every stage up and print what was found."""
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    tell_broken_modules()
    recipe = preflight(recipe)
    storage = open_storage(recipe.store_uri)
    planner = Planner(storage, recipe.seed, {label: "plan" for label in arguments.force})
    run_stages(recipe, planner, Registry(recipe, storage).incumbent)
    if arguments.json:
        stages = [dataclasses.asdict(stage) for stage in planner.stages]
        sys.stdout.write(json.dumps({"run": recipe.run_name, "stages": stages}, indent=2) + "\n")
        return 0
    console = Console()
    console.print(_table(planner.stages))
    for stage in planner.stages:
        if stage.adoption:
            console.print(f"{stage.label}: {stage.adoption}", highlight=False, soft_wrap=True)
    counts = {
        status: sum(stage.status == status for stage in planner.stages)
        for status in ("hit", "miss", "unknown")
    }
    console.print(
        f"{recipe.run_name}: {counts['hit']} reused, {counts['miss']} to run, "
        f"{counts['unknown']} known once what comes before them has run",
        highlight=False,
    )
    return 0


def _table(stages: list[PlannedStage]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for column in ("stage", "status", "fingerprint", "inputs"):
        table.add_column(column)
    for stage in stages:
        inputs = ", ".join(
            f"{name} {digest[:DIGITS] or '?'}" for name, digest in stage.inputs.items()
        )
        table.add_row(stage.label, stage.status, stage.fingerprint[:DIGITS] or "?", inputs)
    return table
