"""`rlhf evaluate`: a model on suites, perhaps beside another.

A recipe that trains nothing, made from the command line, and run as any recipe is: what was
measured before is reused, an interrupted evaluation goes on, MLflow and Prefect show it.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from engines.config.base import local_path
from flows.commands.run import run
from flows.recipe.recipe import Recipe, parse_recipe
from flows.recipe.secrets import refuse_secrets
from flows.recipe.source import with_overrides, with_suites
from flows.report.measured import measured_tables
from infra.errors import ConfigError

MAX_NAME = 48
POLICY_PARTS = ("checkpoint", "trainer.json")
"""File that only the directory of a policy checkpoint has."""


def main(arguments: argparse.Namespace) -> int:
    """Measure, and print a table of what came out."""
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
    """The recipe that measures a model.

    Args:
        model: a directory, a hub id or `models:/NAME@ALIAS`.
        suites: names of shipped ones, or YAML files.
        overrides: `path.to.key=value`.
        seed: of the run; None takes the default.

    Raises:
        ConfigError: one line about what is wrong.
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
    """Name of a suite in a run: that of its file."""
    return re.sub(r"[^a-z0-9_-]+", "_", Path(suite).stem.lower()).strip("_-") or "suite"


def slug(model: str) -> str:
    """A model's name as a part of a recipe's: its last words, in letters and digits."""
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
