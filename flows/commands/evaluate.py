"""`rlhf evaluate`: evaluate a model on suites, optionally against another model.

The command builds a recipe without training and runs it like any other: finished evaluations are
reused, interrupted ones resume, and MLflow and Prefect record it.
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
from flows.recipe.source import refuse_secrets, with_overrides, with_suites
from flows.report.measured import measured_tables
from infra.errors import ConfigError

MAX_NAME = 48
POLICY_PARTS = ("checkpoint", "trainer.json")
"""Files that exist only in the directory of a policy checkpoint."""


def main(arguments: argparse.Namespace) -> int:
    """Evaluate the model and print a table of the scores."""
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

    Args:
        suites: names of shipped suites, or YAML files.

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
