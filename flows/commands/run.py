"""`rlhf run`, `plan`, `evaluate`, `flow` and `nightly`: run or plan a flow and print its outcome.

The flow is recorded at the configured Prefect server (PREFECT_API_URL, or the one of `rlhf up`), or
else at an embedded server that lives as long as the command. If `rlhf up` runs and the deployment
is registered, its worker executes the recipe of `run` and `evaluate`; others run in this process.
`evaluate` builds a recipe without training and runs it like any other: finished evaluations are
reused, interrupted ones resume, and MLflow and Prefect record it. `plan` runs nothing.
"""

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engines.config.base import local_path
from engines.cost.machines import machine_of
from flows.local.embedded_prefect import PrefectServer, prefect_server, use_prefect
from flows.machine_plan import as_json, lines_of, plan_on
from flows.nightly import night as nights
from flows.plan import Status, ask, plan_run
from flows.preflight import preflight
from flows.recipe.recipe import Recipe, load_recipe, parse_recipe
from flows.recipe.source import refuse_secrets, with_overrides, with_suites
from flows.report.report import Report, measured_tables
from infra import env
from infra.errors import ConfigError
from infra.plugins import assumed_installed, import_external_modules
from infra.services.stack import worker_api_url
from tasks.runner.earlier_work import DIGITS


def main(arguments: argparse.Namespace) -> int:
    """Run a recipe, from raw data to a promoted model, and print its outcome."""
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    run(recipe, Console(), arguments)
    return 0


def run(recipe: Recipe, console: Console, arguments: argparse.Namespace) -> Report:
    """Run a recipe in the worker or in this process, and print its outcome.

    `arguments` have `local`, `debug` and optionally `force`, `adopt` and `start_from`.

    Raises:
        PipelineError: the run failed; a `ConfigError` if the recipe or an argument is invalid.
    """
    force, adopt = getattr(arguments, "force", []), getattr(arguments, "adopt", [])
    start_from = getattr(arguments, "start_from", None)
    sys.stderr.writelines(f"{broken}\n" for broken in import_external_modules())
    recipe = preflight(recipe, dict.fromkeys(filter(None, (*force, start_from)), "look"))
    asked = ask(recipe, force, adopt, start_from)
    console.print(f"{recipe.run_name}, in {recipe.home}", highlight=False, soft_wrap=True)
    with _local_run(recipe.home, arguments) as (local_run, server):
        is_served = server.api_url == worker_api_url(recipe.home) and not arguments.local
        deployment = local_run.find_or_hint(console) if is_served else None
        if deployment is None:
            report = local_run.run_locally(asked, console, server)
        else:
            report = local_run.run_served(asked, deployment, console)
    local_run.print_outcome(report, recipe, server.api_url if server.lasting else None, console)
    return report


def flow(arguments: argparse.Namespace) -> int:
    """Run a flow from a Python file in this process, and print its outcome."""
    home = env.home()
    sys.stderr.writelines(f"{broken}\n" for broken in import_external_modules())
    with _local_run(home, arguments) as (local_run, server):
        local_run.run_own_flow(arguments.flow, arguments.overrides, home, Console(), server)
    return 0


def nightly(arguments: argparse.Namespace) -> int:
    """Recompute recipes, or store the last night as baselines; exit code 1 if a recipe failed."""
    baselines = Path(arguments.baselines).absolute() if arguments.baselines else nights.BASELINES
    home, console = env.home(), Console()
    matrix = nights.load_matrix(arguments.recipes)  # invalid recipes fail before a server starts
    if arguments.accept:
        for path in nights.accept(nights.last_night(home), [r.name for r in matrix], baselines):
            console.print(path, highlight=False, markup=False, soft_wrap=True)
        return 0
    with _local_run(home, arguments) as (local_run, server):
        night = local_run.run_night(arguments.recipes, baselines, console, server)
    local_run.print_night(night, nights.nights_of(home) / night.name, console)
    return 1 if night.failed else 0


@contextmanager
def _local_run(home: Path, arguments: argparse.Namespace) -> Iterator[tuple[Any, PrefectServer]]:
    """Provide a Prefect server, and `flows.local.local_run`, which imports Prefect."""
    with prefect_server(home) as server:
        # Prefect reads these settings at import time.
        use_prefect(home, server.api_url, quiet=not arguments.debug)
        yield importlib.import_module("flows.local.local_run"), server


MAX_NAME = 48
POLICY_PARTS = ("checkpoint", "trainer.json")
"""Files that exist only in the directory of a policy checkpoint."""


def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate a model on suites, optionally against another one, and print a table of scores."""
    recipe = evaluation_recipe(
        arguments.model, arguments.suites, arguments.against, arguments.overrides, arguments.seed
    )
    console = Console(stderr=arguments.json)
    report = run(recipe, console, arguments)
    if arguments.json:
        sys.stdout.write(f"{report.model_dump_json(indent=2)}\n")
    else:
        tables = measured_tables({stage.name: stage.metrics for stage in report.stages})
        console.print("\n" + "\n".join(tables), markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    return 0


def evaluation_recipe(
    model: str,
    suites: list[str],
    against: str | None = None,
    overrides: list[str] | None = None,
    seed: int | None = None,
) -> Recipe:
    """Return the recipe that evaluates a model (a directory, a hub id or `models:/NAME@ALIAS`).

    Raises:
        ConfigError: an argument is invalid.
    """
    refuse_secrets(model, "MODEL")  # before a name is made of it
    named = {suite_name(suite): suite for suite in suites}
    if len(named) < len(suites):
        raise ConfigError("--suite", f"got {suites}; need names that differ; rename a file")
    data: dict[str, Any] = {
        "name": f"evaluate-{slug(model)}",
        "model": _model(model, "MODEL"),
        "sft": None,
        "rl": {"num_rounds": 0},
        "suites": named,
    }
    if against is not None:
        data["against"] = _model(against, "--against")
    if seed is not None:
        data["seed"] = seed
    return parse_recipe(with_overrides(with_suites(data), overrides or []))


def suite_name(suite: str) -> str:
    """Return the name of a suite within a run, made from its file name."""
    return re.sub(r"[^a-z0-9_-]+", "_", Path(suite).stem.lower()).strip("_-") or "suite"


def slug(model: str) -> str:
    """Return the end of a model's name in characters that a recipe name allows."""
    text = re.sub(r"[^a-z0-9._]+", "-", model.removeprefix("models:/").lower())
    return text[-MAX_NAME:].strip("-._") or "model"


def _model(path: str, argument: str) -> dict[str, str]:
    directory = local_path(path)
    if directory and all((directory / part).exists() for part in POLICY_PARTS):
        raise ConfigError(
            argument,
            f"{path} is a policy's checkpoint; need a model; `rlhf merge` makes one of it",
        )
    return {"path": path}


PLAN_WORDS: Mapping[Status, str] = {
    "hit": "reused",
    "miss": "to run",
    "likely_run": "likely to run",
    "likely_reuse": "likely reused",
}


def plan(arguments: argparse.Namespace) -> int:
    """Look up every stage, or compute what it needs on another machine; print the result."""
    if arguments.on is not None:
        return _plan_on(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    sys.stderr.writelines(f"{broken}\n" for broken in import_external_modules())
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
    words = [f"{counts[status]} {text}" for status, text in PLAN_WORDS.items() if counts[status]]
    console.print(f"{recipe.run_name}: {', '.join(words)}", highlight=False)
    return 0


def _plan_on(arguments: argparse.Namespace) -> int:
    machine = machine_of(arguments.on)
    with assumed_installed():
        recipe = load_recipe(arguments.recipe, arguments.overrides, seed=arguments.seed)
    found = plan_on(recipe, machine)
    if arguments.json:
        sys.stdout.write(json.dumps(as_json(found), indent=2) + "\n")
        return 0
    console = Console()
    for line in lines_of(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
