"""Runs a flow and shows it on the terminal: the pipeline, a night, a user's own.

A flow runs in this process; the pipeline also in the worker of `rlhf up`. Then the run belongs to
the deployment, so its Prefect page offers *Retry* and *Cancel*.
Promises: plain lines if the output is no terminal. A user's file is executed once, as Prefect's
worker does for a deployment, and can import what `python FILE` could. Ctrl-C cancels a run of the
worker and waits `CANCEL_DEADLINE_S` for its end; any other end of this process leaves it running. A
crashed run is followed while it may be restarted (`flows.automations`). An error of the worker's
run is raised here as a `ConfigError` or `PipelineError`.
Does not promise: that a user's flow uses the stages of this project; that there is a deployment. A
deployment of another checkout, or without a worker of this home, is not used.
"""

import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect import tags
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    LogFilter,
    LogFilterFlowRunId,
    LogFilterLevel,
    LogFilterTimestamp,
)
from prefect.client.schemas.objects import FlowRun, Log, State
from prefect.client.schemas.sorting import LogSort
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling, Crashed
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from flows.automations import DRAIN_DEADLINE_S, STRANDED_S, TAG, UNFINISHED
from flows.local.embedded_prefect import PrefectServer
from flows.nightly.night import Night, last_night
from flows.nightly.nightly_recipes import MATRIX, NIGHT_MD, NotReproducedError, nightly_recipes
from flows.plan import AskedRun
from flows.recipe.recipe import Recipe
from flows.report.report import REPORT_JSON, REPORT_MD, Report, StageReport
from flows.rlhf_pipeline import rlhf_pipeline
from flows.run.pipeline_run import RUN_CONTEXT, LazyCluster, RunContext
from flows.run.registry import tracking_uri
from infra import env
from infra.errors import ConfigError, PipelineError, ServiceError, UnknownPluginError
from infra.redact import RedactingFilter, redact
from infra.services.stack import WORK_POOL
from infra.tracking.journal import JournalRecord
from infra.waiting import wait_for
from tasks.runner.run import StageResult, headline_metric
from tasks.runner.stage import StageObserver
from tasks.runner.submission import forwarded_environment


def run_locally(asked: AskedRun, console: Console, prefect: PrefectServer) -> Report:
    """Run the flow in this process; if a stage has to run, Ray starts while Prefect does.

    Raises:
        PipelineError: the run failed; a `ConfigError` if a job refused its input.
    """
    cluster = LazyCluster(asked.recipe.home)
    if not asked.is_done:
        cluster.start()
    with watched(cluster, console, prefect), tags(TAG):
        return rlhf_pipeline(asked.recipe, asked.force, asked.adopt, asked.start_from)


@contextmanager
def watched(
    cluster: LazyCluster | None, console: Console, prefect: PrefectServer
) -> Iterator[None]:
    """Show a flow of this process on the terminal; release `cluster` at the end.

    Without `cluster`, the flow starts clusters of its own. Warnings of the project's packages are
    printed, which Prefect's quiet logging would hide.
    """
    display = TerminalDisplay(console)
    for package in ("engines", "flows", "infra", "tasks"):
        logger = logging.getLogger(package)
        logger.handlers = [_ConsoleHandler(console)]
        logger.propagate = False
    resetter = RUN_CONTEXT.set(RunContext(observer=display, cluster=cluster))
    try:
        prefect.wait()
        if prefect.history_is_dead:  # no process of an unfinished run can be alive
            unfinished = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
            crashed = Crashed(message="the process of this run was killed")
            with get_client(sync_client=True) as client:
                for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=unfinished)):
                    client.set_flow_run_state(run.id, crashed, force=True)
        yield
    finally:
        if cluster is not None:  # the flow releases it too, unless it failed before that
            cluster.release()
        RUN_CONTEXT.reset(resetter)
        display.close()
        # While the server still runs: buffered events and log lines.
        EventsWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)
        APILogWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self.addFilter(RedactingFilter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        _print_lines(self._console, f"{record.levelname.lower():>12}  {record.getMessage()}")


def print_outcome(
    report: Report, recipe: Recipe, prefect_url: str | None, console: Console
) -> None:
    """Print the outcome and links; `prefect_url` is None if the server ends with the run."""
    _print_report(report, recipe.home, console)
    uri = tracking_uri(recipe.location)
    mlflow = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
    prefect = f"PREFECT_HOME={recipe.home / 'prefect'} prefect server start"
    if prefect_url:
        prefect = prefect_url.removesuffix("/api")
    _print_lines(console, f"MLflow      {mlflow}", f"Prefect     {prefect}")


def _print_report(report: Report, home: Path, console: Console) -> None:
    """Print the table of stages, the accuracies, and the path of the report."""
    console.print()
    console.print(summary_table(report.stages))
    console.print()
    accuracy = ", ".join(f"{name} {value:.1%}" for name, value in report.accuracy.items())
    _print_lines(
        console,
        *([f"accuracy    {accuracy}"] if accuracy else []),
        f"time        {report.seconds:.1f} s",
        f"report      {home / 'runs' / report.run / REPORT_MD}",
    )


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def run_own_flow(
    entrypoint: str, overrides: Sequence[str], home: Path, console: Console, prefect: PrefectServer
) -> None:
    """Run the flow of a file with `overrides` as its argument; print its result if a `Report`.

    Raises:
        ConfigError: there is no such flow, or it refused its recipe.
    """
    own = load_own_flow(entrypoint)
    with watched(LazyCluster(home), console, prefect):
        report = own(list(overrides)) if overrides else own()
    if isinstance(report, Report):
        _print_report(report, home, console)


def load_own_flow(entrypoint: str) -> Flow[..., Any]:
    """Load the flow of a Python file with one flow, or of `FILE:FLOW`; else `ConfigError`."""
    path, _, name = entrypoint.partition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(
            "FLOW", f"got {path!r}, which is no file (cwd is {Path.cwd()}); need a Python file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError("FLOW", f"got {file.name!r}; need a Python file, which ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # so that the file can import its neighbours
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    found = {key: thing for key, thing in vars(module).items() if isinstance(thing, Flow)}
    if name in found:
        return found[name]
    if name or len(found) != 1:
        flows = ", ".join(found) or "none"
        raise ConfigError(
            "FLOW", f"got {entrypoint!r}; its flows are: {flows}; name one, as in {path}:my_flow"
        )
    return next(iter(found.values()))


def run_night(
    recipes: Sequence[str], baselines: Path, console: Console, prefect: PrefectServer
) -> Night:
    """Run the nightly flow in this process, by default over `MATRIX`; return the night."""
    with watched(None, console, prefect), suppress(NotReproducedError):
        nightly_recipes(list(recipes or MATRIX), str(baselines))
    return last_night(env.home())


def print_night(night: Night, directory: Path, console: Console) -> None:
    """Print a line for each recipe, and the path of the report."""
    console.print()
    for outcome in night.outcomes:
        verdict = outcome.verdict
        stage = f" at {verdict.stage}" if verdict.stage else ""
        lines = [f"{verdict.recipe}: {verdict.word}{stage}", *verdict.problems]
        if verdict.drifted:
            lines.append(f"another digest since {verdict.drifted}: {'; '.join(verdict.causes)}")
        _print_lines(console, lines[0], *(f"    {line}" for line in (*lines[1:], *verdict.notes)))
    _print_lines(console, f"\nreport      {directory / NIGHT_MD}")


DIGEST_DIGITS = 12
LABEL_WIDTH = 19


class TerminalDisplay(StageObserver):
    """Writes a run to the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:>19}"),
            BarColumn(bar_width=40),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None

    def stage_started(self, label: str, fingerprint: str) -> None:
        """Remove the bar of the stage before; a new one appears with the first progress record."""
        self._end_bar()

    def message(self, label: str, text: str) -> None:
        """Print a line about a stage's job."""
        _print_lines(self._console, f"{label:>{LABEL_WIDTH}}  {text}")

    def record(self, label: str, record: JournalRecord) -> None:
        """Show a journal record of a running stage: message as a line, progress as a bar."""
        if record.message:
            self.message(label, record.message)
        if record.kind == "progress" and record.done is not None and record.total:
            if self._bar is None:
                self._progress.start()
                self._bar = self._progress.add_task(label, total=record.total)
            self._progress.update(self._bar, completed=record.done, total=record.total)

    def stage_finished(self, result: StageResult) -> None:
        """Print a line that summarizes the stage."""
        self._end_bar()
        done = "reused" if result.reused else f"ran in {result.wall_s:.1f} s"
        digest = result.artifact.digest[:DIGEST_DIGITS]
        parts = [done, f"digest {digest}", headline_metric(result.metrics)]
        self.message(result.label, ", ".join(filter(None, parts)))

    def close(self) -> None:
        """Stop the live display."""
        self._end_bar()
        self._progress.stop()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
            self._progress.stop()


def summary_table(stages: Sequence[StageReport]) -> Table:
    """Return a table of stage, state, seconds, digest and headline metric."""
    headings = ("stage", "", Column("seconds", justify="right"), "digest", "metric")
    table = Table(*headings, show_edge=False, pad_edge=False)
    for stage in stages:
        table.add_row(
            stage.name,
            stage.state,
            f"{stage.seconds:.1f}",
            stage.digest[:DIGEST_DIGITS],
            headline_metric(stage.metrics),
        )
    return table


DEPLOYMENT = "rlhf-pipeline/rlhf-pipeline"
CHECKOUT = Path(__file__).resolve().parents[2]
POLL_S = 1.0
CANCEL_DEADLINE_S = 60.0
HINT = (
    "no deployment of this checkout at the server: the run is in this process, and its page has no "
    "Retry; `PREFECT_API_URL={url} prefect --no-prompt deploy --all` in {checkout} registers one"
)
GIVEN_UP_S = STRANDED_S + 25
"""A crashed run that is not restarted within this time is given up."""
LATE = timedelta(seconds=10)
"""Maximum delay of a log line relative to a later one."""
PAGE = 200
SHOWN_LOGGERS = frozenset({"prefect.flow_runs", "prefect.task_runs"})
"""Loggers that are shown: those of the flow and its stages, not the worker's."""
FAILED = "Flow run encountered an exception: "
"""Start of Prefect's message about an error; the error's type and text follow."""
OF_THE_USER = {ConfigError.__name__, UnknownPluginError.__name__}


def find_or_hint(console: Console, checkout: Path = CHECKOUT) -> UUID | None:
    """Return the id of the deployment whose workers read the code from `checkout`.

    Without one, print how to register it and return None.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        found = client.read_deployment_by_name(DEPLOYMENT)
        steps = [arguments for step in found.pull_steps or [] for arguments in step.values()]
        if steps == [{"directory": str(checkout)}] and found.work_pool_name == WORK_POOL:
            return found.id
    _print_lines(console, HINT.format(checkout=checkout, url=PREFECT_API_URL.value()))
    return None


def run_served(asked: AskedRun, deployment: UUID, console: Console) -> Report:
    """Start a run in the worker, and follow it to its end.

    Raises:
        ConfigError: a job refused its input.
        PipelineError: the run did not complete.
        ServiceError: the server stopped answering.
    """
    with get_client(sync_client=True) as client:
        try:
            run = client.create_flow_run_from_deployment(
                deployment,
                parameters={
                    "recipe": asked.recipe.model_dump(mode="json"),
                    "force": asked.force,
                    "adopt": asked.adopt,
                    "start_from": asked.start_from,
                },
                job_variables={"env": forwarded_environment()},
            )
            state = _follow(client, run, console)
        except HTTPError as error:
            raise ServiceError(
                f"the Prefect server does not answer ({error}); the run goes on without this "
                "command, and the same command waits for its stages"
            ) from None
    if not state.is_completed():
        console.print(f"Retry on the page of {run.name} resumes it", highlight=False)
        raise failure_of(state)
    return Report.model_validate_json(
        (asked.recipe.home / "runs" / asked.recipe.run_name / REPORT_JSON).read_bytes()
    )


def failure_of(state: State) -> PipelineError:
    """Return the error that ended the run in the worker."""
    message = state.message or ""
    kind, _, told = message.removeprefix(FAILED).partition(": ")
    if not message.startswith(FAILED):
        return PipelineError(f"{state.name}: {message}")
    if kind not in OF_THE_USER:
        return PipelineError(told)
    return ConfigError(*told.split(": ", 1)) if ": " in told else ConfigError("recipe", told)


def _follow(client: SyncPrefectClient, run: FlowRun, console: Console) -> State:
    shown = _Shown(client, run.id, console)
    try:
        while (state := shown.end()) is None:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        console.print("cancelling the run", highlight=False)
        # Without force, the server itself cancels a run that did not begin.
        client.set_flow_run_state(run.id, Cancelling(message="Ctrl-C"))
        wait_for(shown.end, f"run {run.name} to be cancelled", CANCEL_DEADLINE_S, POLL_S)
        raise
    time.sleep(POLL_S)
    shown.end()  # the last log lines arrive after the final state
    return state


class _Shown:
    def __init__(self, client: SyncPrefectClient, run: UUID, console: Console) -> None:
        self._client, self._run, self._console = client, run, console
        self._state = ""
        self._lines: set[UUID] = set()
        self._newest: datetime | None = None

    def end(self) -> State | None:
        """Print what is new; return the final state, or None while the run may continue."""
        state = self._client.read_flow_run(self._run).state
        if state is None:
            return None
        if state.name != self._state:
            self._state = state.name or ""
            _print_lines(self._console, redact(f"{'run':>{LABEL_WIDTH}}  {state.name}"))
        for log in self._logs():
            if log.id not in self._lines and log.name in SHOWN_LOGGERS:
                self._lines.add(log.id)
                _print_lines(self._console, redact(log.message))
            self._newest = max(self._newest or log.timestamp, log.timestamp)
        rests = datetime.now(UTC) - state.timestamp > timedelta(seconds=GIVEN_UP_S)
        return state if state.is_final() and (rests or not state.is_crashed()) else None

    def _logs(self) -> list[Log]:
        """Return lines that may be new, oldest first."""
        newest, found = self._newest, list[Log]()
        since = LogFilterTimestamp.model_validate({"after_": newest - LATE}) if newest else None
        which = LogFilter(
            flow_run_id=LogFilterFlowRunId(any_=[self._run]),
            level=LogFilterLevel(ge_=logging.INFO),
            timestamp=since,
        )
        while True:
            page = self._client.read_logs(which, PAGE, len(found), LogSort.TIMESTAMP_ASC)
            found += page
            if len(page) < PAGE:
                return found
