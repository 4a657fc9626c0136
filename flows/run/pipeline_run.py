"""Opens and closes what a pipeline run uses: home, store, cluster, tracking and display.

Promises: the first stage that has to run starts the Ray cluster, unless a command started it before
in the background, and the last user ends it. A run that ends while its job runs leaves job and
cluster to the next run, unless it was cancelled or interrupted.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from engines.config.recipe import NOT_IDENTITY, Recipe
from engines.config.stages.base import Runtime
from flows.diagnosis.diagnosis import diagnose, write_diagnosis
from flows.diagnosis.findings import run_views
from flows.report.page import show_diagnosis, show_report
from flows.report.report import Report, build_report, make_run_directory, write_report
from flows.run.registry import Registry, RoundGate, open_mirrors, open_tracker
from infra.errors import PipelineError
from infra.host.servers import LOCK_DEADLINE_S
from infra.ray.cluster import Cluster, ensure_cluster
from infra.ray.jobs import RayJobs
from infra.redact import redact
from infra.store.artifacts import digest_in_path
from infra.store.canonical import sha256_json
from infra.store.storage import open_storage
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import Ledger
from infra.tracking.shipper import Shipper
from infra.waiting import in_thread, result_within
from tasks.runner.recorder import FanOut, Recorder, end_status
from tasks.runner.stage import StageContext, StageObserver


@dataclass
class LazyCluster:
    """Starts the Ray cluster of a run when needed; a local one keeps its files in `home`."""

    home: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _given_up: threading.Event = field(default_factory=threading.Event, init=False)
    _starting: Future[Cluster] | None = field(default=None, init=False)

    def jobs(self) -> RayJobs:
        """Return the job client of the cluster; start the cluster if it is not running.

        Raises:
            ServiceError: the cluster could not be started.
            DeadlineError: it did not start in time.
        """
        return RayJobs(result_within(self.start(), "the Ray cluster to start", LOCK_DEADLINE_S))

    def release(self, besides: Collection[str] = ()) -> None:
        """End the cluster if it has no other user and no job; may be called twice.

        A start in progress is aborted. Jobs named in `besides` do not keep the cluster alive.
        """
        if self._starting is None:
            return
        self._given_up.set()
        try:
            self._starting.result(LOCK_DEADLINE_S).release(besides)
        except (PipelineError, OSError) as error:  # a TimeoutError is an OSError
            # A failed start was reported to its user. A failed end is retried by the guard.
            _log.debug("the cluster was not released: %s", error)

    def start(self) -> Future[Cluster]:
        """Start the cluster in the background, if it is not running."""
        with self._lock:
            if self._starting is None:
                start = partial(ensure_cluster, self.home, given_up=self._given_up.is_set)
                self._starting = in_thread(start, "ray-start")
            return self._starting


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """Observer and cluster that a command gives to a flow in its own process.

    Without a command, the observer does nothing, because the Prefect run page shows the stages.
    """

    observer: StageObserver = field(default_factory=StageObserver)
    cluster: LazyCluster | None = None


RUN_CONTEXT: ContextVar[RunContext | None] = ContextVar("RUN_CONTEXT", default=None)
"""Set by a command that runs the flow in its own process."""


def is_watched() -> bool:
    """Return True if a command watches the flow; a function, since a flow's globals are pickled."""
    return RUN_CONTEXT.get() is not None


class PipelineRun:
    """A pipeline run: `stages` runs stages, `gate` accepts rounds, `registry` has the incumbent."""

    def __init__(
        self,
        recipe: Recipe,
        force: Mapping[str, str],
        adopt: Collection[str],
        cluster: LazyCluster,
        observer: StageObserver,
    ) -> None:
        context = FlowRunContext.get()
        flow_run = context.flow_run if context else None
        metadata = {"flow_run_id": str(flow_run.id)} if flow_run else {}
        history = StageHistory(open_storage(recipe.store_uri))
        # A repeated command continues its run; a flow run of a deployment is a separate run.
        repeated = is_watched() or flow_run is None
        self.recorder = _recorder(recipe, history, {} if repeated else metadata)
        self.stages = StageContext(
            storage=history.storage,
            ray_jobs=cluster.jobs,
            recorder=self.recorder,
            observer=observer,
            runtime=Runtime(
                progress_deadlines_s=recipe.progress_deadlines_s.model_dump(exclude_none=True)
            ),
            orchestrated=flow_run is not None,
            seed=recipe.seed,
            force=force,
            adopt=adopt,
            metadata=metadata,
        )
        history.storage.runs.begin(self.recorder.run_key, recipe.run_name)
        for _, path in recipe.models():
            digest = digest_in_path(path)
            if digest is not None:  # else `rlhf gc` may remove a model whose alias has moved
                history.storage.runs.read(self.recorder.run_key, digest)
        self.registry = Registry(recipe.promote, open_tracker(recipe.location), history.storage)
        self.gate = RoundGate(recipe.diagnosis, history, self._warn)
        self._observer = observer
        self._recipe = recipe
        self._history = history
        self._orchestrated = flow_run is not None
        self._directory = make_run_directory(recipe)
        self._started = time.monotonic()

    def finish(self) -> Report:
        """Write the report, record the run as finished, show the report on the Prefect run page."""
        report = build_report(
            self._recipe, self.stages.results, time.monotonic() - self._started, self.gate.rejected
        )
        directory = write_report(report, self._recipe, self._history)
        metrics = {
            **{f"accuracy/{name}": value for name, value in report.accuracy.items()},
            **{f"rejected/{label}": 1.0 for label in self.gate.rejected},
        }
        self.recorder.run_finished(directory, metrics)
        if self._orchestrated:
            show_report(report, directory)
        return report

    def fail(self, error: BaseException) -> None:
        """Record how the run ended; diagnose a failed run and show the diagnosis."""
        self.recorder.run_ended(end_status(error))
        if not isinstance(error, Exception):
            return
        recipe, key = self._recipe, self.recorder.run_key
        try:
            runs = [run for run in self._history.storage.runs.known() if run.key == key]
            views = [view for run in runs for view in run_views(self._history, run)]
            diagnosis = diagnose(recipe.run_name, views, recipe.diagnosis)
            page = write_diagnosis(diagnosis, self._directory)
            if diagnosis.ills:
                self._observer.message("diagnosis", f"{diagnosis.verdict}: {page}")
        except (PipelineError, OSError, ValueError) as failure:  # must not hide the run's error
            self._observer.message("diagnosis", f"none: {redact(str(failure))}")
        if self._orchestrated:
            show_diagnosis(recipe.name, recipe.run_name, self._directory)

    def _warn(self, label: str, text: str) -> None:
        self._observer.message(label, f"warning: {text}")
        logger = get_run_logger() if self._orchestrated else _log
        logger.warning("%s  %s", label, redact(text))


@contextmanager
def open_run(
    recipe: Recipe, force: Mapping[str, str] = {}, adopt: Collection[str] = ()
) -> Iterator[PipelineRun]:
    """Open the resources of a run; record how it failed, and release them at its end.

    `force` and `adopt` are those of `flows.plan.plan_run`.
    """
    context = RUN_CONTEXT.get() or RunContext()
    cluster = context.cluster or LazyCluster(recipe.home)
    run = PipelineRun(recipe, force, adopt, cluster, context.observer)
    with ExitStack() as stack:
        # Runs after the release of the cluster, because closing the trackers may take minutes.
        stack.callback(run.recorder.close)

        @stack.push
        def on_exit(kind: object, error: BaseException | None, traceback: object) -> None:
            # Ctrl-C also stops the job, unless another run follows it. No other end stops it here,
            # so that the next run attaches to it; a cancelled flow run's follower has stopped it.
            is_cancelled = isinstance(error, KeyboardInterrupt)
            try:
                if is_cancelled:
                    with suppress(PipelineError):
                        run.stages.stop_jobs()
                if error is not None:
                    run.fail(error)
            finally:
                cluster.release(run.stages.followed if is_cancelled else ())

        yield run


def _recorder(recipe: Recipe, history: StageHistory, flow_run: Mapping[str, str]) -> Recorder:
    """Return the recorder of a run that is identified by its flow run, else by home and recipe."""
    params = recipe.model_dump(mode="json", exclude=NOT_IDENTITY)
    first, *mirrors = [
        Shipper(Ledger(recipe.home, tracker.address, recipe.store_uri), tracker, history)
        for tracker in (open_tracker(recipe.location), *open_mirrors(recipe.location))
    ]
    return Recorder(
        FanOut(first, mirrors) if mirrors else first,
        identity=flow_run or {"home": str(recipe.home), "recipe": sha256_json(params)},
        name=recipe.run_name,
        params=params,
        tags={"recipe": recipe.name, "seed": str(recipe.seed), **flow_run},
        store_uri=recipe.store_uri,
    )
