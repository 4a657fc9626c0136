"""Runs a recipe in the worker of `rlhf up` and shows it on the terminal.

Promises: the run belongs to the deployment, so its Prefect page offers *Retry* and *Cancel*. Ctrl-C
cancels the run and waits until it ended; any other end of this process leaves it running. A crashed
run is followed while it may be restarted (`flows.automations`). Its errors are raised as if it had
run in this process.
Does not promise: a deployment. One of another checkout, or without a worker of this home, is not
used.
"""

import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    LogFilter,
    LogFilterFlowRunId,
    LogFilterLevel,
    LogFilterTimestamp,
)
from prefect.client.schemas.objects import FlowRun, Log, State
from prefect.client.schemas.sorting import LogSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling
from rich.console import Console

from flows.automations import STRANDED_S
from flows.local.local_run import LABEL_WIDTH
from flows.plan import AskedRun
from flows.report.report import REPORT_JSON, Report
from infra.errors import ConfigError, PipelineError, ServiceError, UnknownPluginError
from infra.redact import redact
from infra.services.stack import WORK_POOL
from infra.waiting import wait_for
from tasks.runner.submission import forwarded_environment

DEPLOYMENT = "rlhf-pipeline/rlhf-pipeline"
CHECKOUT = Path(__file__).resolve().parents[2]
POLL_S = 1.0
CANCEL_DEADLINE_S = 60.0
HINT = (
    "no deployment of this checkout at the server: the run is of this process, and its page has no "
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
OF_THE_USER = {kind.__name__ for kind in (ConfigError, UnknownPluginError)}


def find_deployment(checkout: Path = CHECKOUT) -> UUID | None:
    """Return the id of the deployment whose workers read the code from `checkout`, or None."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            return None
    steps = [arguments for step in found.pull_steps or [] for arguments in step.values()]
    is_ours = [{"directory": str(checkout)}] == steps and found.work_pool_name == WORK_POOL
    return found.id if is_ours else None


def find_or_hint(console: Console, checkout: Path = CHECKOUT) -> UUID | None:
    """Return the id of the deployment; without one, print how to register it and return None."""
    found = find_deployment(checkout)
    if found is None:
        hint = HINT.format(checkout=checkout, url=PREFECT_API_URL.value())
        console.print(hint, highlight=False, markup=False, soft_wrap=True)
    return found


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
        """Print what is new; return the final state, or None while the run continues."""
        state = self._client.read_flow_run(self._run).state
        if state is None:
            return None
        if state.name != self._state:
            self._state = state.name or ""
            self._say(f"{'run':>{LABEL_WIDTH}}  {state.name}")
        for log in self._logs():
            if log.id not in self._lines and log.name in SHOWN_LOGGERS:
                self._lines.add(log.id)
                self._say(log.message)
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

    def _say(self, text: str) -> None:
        self._console.print(redact(text), highlight=False, markup=False, soft_wrap=True)
