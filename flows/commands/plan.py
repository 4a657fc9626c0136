"""`rlhf plan`: which stages a run would compute, and which it would reuse."""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from flows.broken_modules import tell_broken_modules
from flows.plan import Status, plan_run
from flows.preflight import preflight
from flows.recipe.recipe import load_recipe
from tasks.runner.earlier_work import DIGITS

WORDS: Mapping[Status, str] = {
    "hit": "reused",
    "miss": "to run",
    "likely_run": "likely to run",
    "likely_reuse": "likely reused",
}


def main(arguments: argparse.Namespace) -> int:
    """Look up every stage and print the result."""
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    tell_broken_modules()
    tokens = dict.fromkeys(filter(None, (*arguments.force, arguments.start_from)), "plan")
    recipe = preflight(recipe, tokens)
    planner = plan_run(recipe, tokens, start_from=arguments.start_from)
    if arguments.json:
        stages = [dataclasses.asdict(stage) for stage in planner.stages]
        sys.stdout.write(json.dumps({"run": recipe.run_name, "stages": stages}, indent=2) + "\n")
        return 0
    console = Console()
    table = Table("stage", "status", "fingerprint", "inputs", show_edge=False, pad_edge=False)
    for stage in planner.stages:
        inputs = ", ".join(
            f"{name} {digest[:DIGITS] or '?'}" for name, digest in stage.inputs.items()
        )
        table.add_row(
            stage.label, stage.status.replace("_", " "), stage.fingerprint[:DIGITS] or "?", inputs
        )
    console.print(table)
    for stage in planner.stages:
        for text in filter(None, (stage.why, stage.adoption, stage.rejected)):
            console.print(f"{stage.label}: {text}", highlight=False, soft_wrap=True)
    counts = Counter(stage.status for stage in planner.stages)
    words = [f"{counts[status]} {text}" for status, text in WORDS.items() if counts[status]]
    console.print(f"{recipe.run_name}: {', '.join(words)}", highlight=False)
    return 0
