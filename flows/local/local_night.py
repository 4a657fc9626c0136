"""Runs the nightly flow in this process and shows it on the terminal."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from flows.local.display import TerminalDisplay
from flows.local.embedded_prefect import PrefectServer
from flows.local.local_run import crash_dead_runs, drain_prefect, show_warnings
from flows.nightly.night import Night, last_night
from flows.nightly.page import NIGHT_MD
from flows.nightly_recipes import MATRIX, NotReproducedError, nightly_recipes
from flows.run.pipeline_run import SURROUNDINGS, Surroundings
from infra import env


def run_night(
    recipes: Sequence[str], baselines: Path, console: Console, prefect: PrefectServer
) -> Night:
    """Run the flow in this process; without `recipes`, it runs the shipped matrix."""
    home = env.home()
    display = TerminalDisplay(console)
    show_warnings(console)
    resetter = SURROUNDINGS.set(Surroundings(observer=display))
    try:
        prefect.wait()
        if prefect.history_is_dead:
            crash_dead_runs()
        with suppress(NotReproducedError):
            nightly_recipes(list(recipes or MATRIX), str(baselines))
        return last_night(home)
    finally:
        SURROUNDINGS.reset(resetter)
        display.close()
        drain_prefect()


def print_night(night: Night, directory: Path, console: Console) -> None:
    """Print a line for each recipe, and the path of the report."""
    console.print()
    for outcome in night.outcomes:
        verdict = outcome.verdict
        stage = f" at {verdict.stage}" if verdict.stage else ""
        lines = [f"{verdict.recipe}: {verdict.word}{stage}", *verdict.problems]
        if verdict.drifted:
            lines.append(f"another digest since {verdict.drifted}: {'; '.join(verdict.causes)}")
        for line in (*lines[:1], *(f"    {each}" for each in (*lines[1:], *verdict.notes))):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nreport      {directory / NIGHT_MD}", highlight=False, soft_wrap=True)
