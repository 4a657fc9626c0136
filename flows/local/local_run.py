"""Runs the pipeline's flow in this process and shows it on the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.states import Crashed
from rich.console import Console

from flows.automations import TAG
from flows.local.display import TerminalDisplay, summary_table
from flows.local.embedded_prefect import PrefectServer
from flows.plan import AskedRun
from flows.recipe.recipe import Recipe
from flows.report.report import REPORT_MD, Report
from flows.rlhf_pipeline import rlhf_pipeline
from flows.run.lazy_cluster import LazyCluster
from flows.run.pipeline_run import SURROUNDINGS, Surroundings
from flows.run.registry import tracking_uri
from infra.redact import RedactingFilter

DRAIN_DEADLINE_S = 10.0
UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def run_locally(asked: AskedRun, console: Console, prefect: PrefectServer) -> Report:
    """Run the flow in this process; if a stage has to run, Ray starts while Prefect does.

    Raises:
        ConfigError: a job refused its input.
    """
    cluster = LazyCluster(asked.recipe.home)
    if not asked.is_done:
        cluster.start()
    with watched(cluster, console, prefect), tags(TAG):
        return rlhf_pipeline(asked.recipe, asked.force, asked.adopt, asked.start_from)


@contextmanager
def watched(cluster: LazyCluster, console: Console, prefect: PrefectServer) -> Iterator[None]:
    """Show a flow of this process on the terminal; release `cluster` at the end."""
    display = TerminalDisplay(console)
    show_warnings(console)
    resetter = SURROUNDINGS.set(Surroundings(observer=display, cluster=cluster))
    try:
        prefect.wait()
        if prefect.history_is_dead:
            crash_dead_runs()
        yield
    finally:
        # The flow releases it too, unless it failed before that.
        cluster.release()
        SURROUNDINGS.reset(resetter)
        display.close()
        drain_prefect()


def crash_dead_runs() -> None:
    """Mark flow runs as crashed that a stopped server left in an unfinished state."""
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=running)):
            client.set_flow_run_state(
                run.id, Crashed(message="the process of this run was killed"), force=True
            )


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.addFilter(RedactingFilter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        text = f"{record.levelname.lower():>12}  {record.getMessage()}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_warnings(console: Console) -> None:
    """Print the warnings of the project's packages, which Prefect's quiet logging would hide."""
    for package in ("engines", "flows", "infra", "tasks"):
        logger = logging.getLogger(package)
        logger.handlers = [_ConsoleHandler(console)]
        logger.propagate = False


def drain_prefect() -> None:
    """Send Prefect's buffered events and log lines while its server still runs."""
    EventsWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)
    APILogWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)


def print_outcome(
    report: Report, recipe: Recipe, prefect_url: str | None, console: Console
) -> None:
    """Print the outcome and links; `prefect_url` is None if the server ends with the run."""
    print_report(report, recipe.home, console)
    hints = (
        f"MLflow      {mlflow_hint(recipe)}",
        f"Prefect     {prefect_hint(recipe, prefect_url)}",
    )
    for hint in hints:
        console.print(hint, highlight=False, markup=False, soft_wrap=True)


def print_report(report: Report, home: Path, console: Console) -> None:
    """Print the table of stages, the accuracies, and the path of the report."""
    console.print()
    console.print(summary_table(report.stages))
    console.print()
    accuracy = ", ".join(f"{name} {value:.1%}" for name, value in report.accuracy.items())
    lines = [
        f"accuracy    {accuracy}" if accuracy else "",
        f"time        {report.seconds:.1f} s",
        f"report      {home / 'runs' / report.run / REPORT_MD}",
    ]
    for line in filter(None, lines):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def mlflow_hint(recipe: Recipe) -> str:
    """Return how to open the run in MLflow."""
    uri = tracking_uri(recipe.location)
    return uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"


def prefect_hint(recipe: Recipe, prefect_url: str | None) -> str:
    """Return how to open the run in Prefect."""
    if prefect_url:
        return prefect_url.removesuffix("/api")
    return f"PREFECT_HOME={recipe.home / 'prefect'} prefect server start"
