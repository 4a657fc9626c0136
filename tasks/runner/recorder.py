"""Sends a pipeline run to MLflow from one thread of its own, in order.

Promises: no stage ever waits for MLflow; nothing is imported or opened before the first stage
that really runs, so a run that reuses everything costs nothing; a run has one writer. What could
not be sent stays in the journals.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from engines.config.stages import PromoteConfig
from infra.store.stage_spec import Artifact, CommitRecord
from infra.tracking.tracker import StageRun, Tracker
from tasks.runner.identity import StageRequest

CLOSE_DEADLINE_S = 90.0

EndStatus = Literal["FAILED", "KILLED"]
StageStatus = Literal["FINISHED", "FAILED", "KILLED"]

_log = logging.getLogger(__name__)


class Recorder:
    """One pipeline run in MLflow: a parent run, and a child for each of its stages.

    Args:
        make_tracker: opens the tracker; called on the recorder's thread, when first needed.
        run_name: name of the parent run.
        params: settings of the parent run.
        tags: tags of the parent run; `flow_run_id` makes a retried flow run continue its run.
    """

    def __init__(
        self,
        make_tracker: Callable[[], Tracker],
        run_name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self._make_tracker = make_tracker
        self._run_name = run_name
        self._params = params
        self._tags = tags
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._waiting_to_ship: set[str] = set()
        self._thread: threading.Thread | None = None
        self._tracker: Tracker | None = None
        self._parent_run_id: str | None = None
        self._stage_runs: dict[str, StageRun] = {}
        self._reused: list[tuple[StageRequest, CommitRecord]] = []

    def stage_reused(self, request: StageRequest, record: CommitRecord) -> None:
        """A stage was found committed; that is told once some stage of this run is not."""
        self._reused.append((request, record))
        if self._thread is not None:
            self._put(self._tell_reused)

    def stage_started(self, request: StageRequest) -> None:
        """A stage begins to run: find or make its run."""
        self._put(self._tell_reused)
        self._put(lambda: self._open_stage(request))

    def ship(self, label: str, journal_path: Path) -> None:
        """A stage's journal has new records; sent unless that is waiting to be done already."""
        if label not in self._waiting_to_ship:
            self._waiting_to_ship.add(label)
            self._put(lambda: self._ship(label, journal_path))

    def stage_finished(self, label: str, journal_path: Path, record: CommitRecord) -> None:
        """A stage was committed: send the rest of its journal and its output."""
        self._put(lambda: self._finish(label, journal_path, "FINISHED", record))

    def stage_ended(self, label: str, journal_path: Path, status: EndStatus) -> None:
        """A stage ended without a commit."""
        self._put(lambda: self._finish(label, journal_path, status, None))

    def register_model(
        self, gate: PromoteConfig, model: Artifact, metrics: Mapping[str, float], done: Path
    ) -> None:
        """A model passed its gate: make it a version, and move the alias.

        Args:
            gate: name of the registered model, and the alias.
            model: the merged model.
            metrics: by which it was promoted.
            done: an empty file that is made when it is done.
        """
        self._put(lambda: self._register(gate, model, metrics, done))

    def run_finished(self, directory: Path, metrics: Mapping[str, float]) -> None:
        """The run has its results: log the report's files, if anything of it is in MLflow."""
        if self._thread is not None:
            self._put(lambda: self._finish_run(directory, metrics))

    def run_ended(self, status: EndStatus) -> None:
        """The run ended without its results."""
        if self._thread is not None:
            self._put(lambda: self._end_run(status))

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Wait until everything is sent, but not for ever.

        Args:
            deadline_s: for all of it, in seconds.
        """
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _log.warning(
                "MLflow did not take everything within %g s; metrics stay in the journals",
                deadline_s,
            )

    def _put(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="recorder", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  lineage is worth a warning, never a run
                _log.warning("MLflow: %s", error)

    def _open(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._make_tracker()
            self._parent_run_id = self._tracker.start_pipeline(
                self._run_name, self._params, self._tags
            )
        return self._tracker

    def _open_stage(self, request: StageRequest) -> StageRun:
        run = self._open().stage_run(
            self._parent_run_id,
            request.label,
            request.fingerprint,
            request.config.model_dump(mode="json"),
            {name: artifact.digest for name, artifact in request.inputs.items()},
        )
        self._stage_runs[request.label] = run
        return run

    def _tell_reused(self) -> None:
        while self._reused:
            request, record = self._reused.pop(0)
            run = self._open_stage(request)
            run.finish("FINISHED", record.artifact, record.metrics, reused=True)

    def _ship(self, label: str, journal_path: Path, *, now: bool = False) -> None:
        self._waiting_to_ship.discard(label)
        if label in self._stage_runs:
            self._stage_runs[label].ship(journal_path, now=now)

    def _finish(
        self, label: str, journal_path: Path, status: StageStatus, record: CommitRecord | None
    ) -> None:
        self._ship(label, journal_path, now=True)
        if label in self._stage_runs:
            artifact = record.artifact if record else None
            self._stage_runs[label].finish(status, artifact, record.metrics if record else None)

    def _register(
        self, gate: PromoteConfig, model: Artifact, metrics: Mapping[str, float], done: Path
    ) -> None:
        version = self._open().register_model(
            gate.model_name, gate.alias, model, self._parent_run_id, metrics
        )
        if version is not None:
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()

    def _finish_run(self, directory: Path, metrics: Mapping[str, float]) -> None:
        tracker = self._open()
        tracker.log_artifacts(self._parent_run_id, directory, "report")
        tracker.finish_pipeline(self._parent_run_id, "FINISHED", metrics)

    def _end_run(self, status: EndStatus) -> None:
        self._open().finish_pipeline(self._parent_run_id, status)


def end_status(error: BaseException) -> EndStatus:
    """How an error ends a run: by itself, or by someone's hand (SIGTERM, Ctrl-C)."""
    return "FAILED" if isinstance(error, Exception) else "KILLED"
