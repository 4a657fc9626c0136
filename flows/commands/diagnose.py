"""`rlhf diagnose`: findings about a run, in the order resources, communication, algorithm.

An unfinished run is diagnosed up to its current step, with the thresholds of its recipe.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from engines.config.recipe import DiagnosisConfig
from flows.commands.show import find_run
from flows.diagnosis.diagnosis import diagnose
from flows.diagnosis.findings import run_views
from flows.diagnosis.page import text, write_diagnosis
from flows.report.report import RECIPE_JSON
from infra import env
from infra.errors import ConfigError
from infra.store.atomic import make_directories
from infra.store.storage import open_storage
from infra.tracking.history import StageHistory


def main(arguments: argparse.Namespace) -> int:
    """Write the page and print its findings; the exit code is 0 if there are none."""
    home = env.home()
    history = StageHistory(open_storage(arguments.store or str(home / "store")))
    run, only = find_run(history.storage, home, arguments.run, "RUN")
    views = run_views(history, run, only)
    if not views:
        raise ConfigError("RUN", f"{run.name} has no stage that said what it is; run it first")
    directory = home / "runs" / run.name
    diagnosis = diagnose(run.name, views, _thresholds(directory))
    make_directories(directory)
    path = write_diagnosis(diagnosis, directory)
    if arguments.json:
        findings = [asdict(finding) for finding in diagnosis.findings]
        sys.stdout.write(f"{json.dumps({'run': run.name, 'findings': findings}, indent=2)}\n")
    else:
        sys.stdout.write(f"{text(diagnosis)}\n{path}\n")
    return 1 if diagnosis.ills else 0


def _thresholds(directory: Path) -> DiagnosisConfig:
    """Return the thresholds of the run's recipe, or the defaults if this home has no such run."""
    try:
        recipe = json.loads((directory / RECIPE_JSON).read_bytes())
    except FileNotFoundError:
        return DiagnosisConfig()
    return DiagnosisConfig.model_validate(recipe.get("diagnosis", {}))
