"""Records a pipeline run and its stages in the tracking ledger, and shows stages on run pages.

Promises: only `close` waits for a tracker. A pipeline run, with its retries and repetitions, is one
run of the tracker. A stage's run stays below the pipeline run that computed it, and later runs
refer to its id. A forced generation is a separate run. A repeated run whose stages the tracker
already has writes nothing. Outside a Prefect run, log lines go to a plain logger. A slow or missing
Prefect server costs a stage one warning and no work.
Does not promise: that a follower is not delayed. Prefect's client retries for up to a minute, in
which the follower waits but the job does not.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from infra.redact import redact
from infra.store.canonical import sha256_json
from infra.store.stage_spec import Adoption, CommitRecord
from infra.tracking.journal import JournalRecord
from infra.tracking.ledger import Owner, RunEntry
from infra.tracking.shipper import Shipper
from tasks.runner.run import StageRequest

CLOSE_DEADLINE_S = 60.0
"""Deadline after a successful run; a report or model upload extends it to `UPLOAD_DEADLINE_S`."""
UPLOAD_DEADLINE_S = 3600.0
"""Deadline of all uploads: 2 GiB, the largest model that is uploaded, at 0.6 MB/s."""
CLOSE_IN_HASTE_S = 5.0
"""Deadline for a failed or cancelled run; the next run sends what is missing."""

EndStatus = Literal["FAILED", "KILLED"]


class FanOut:
    """Sends to the first tracker, whose ledger answers `find`, and to its mirrors.

    A tracker that fails does not delay the others.
    """

    def __init__(self, first: Shipper, mirrors: Sequence[Shipper]) -> None:
        self._first, self._mirrors = first, tuple(mirrors)

    def begin(self) -> None:
        """Start all shippers."""
        for teller in (self._first, *self._mirrors):
            teller.begin()

    def find(self, key: str) -> RunEntry | None:
        """Return the entry of the first tracker."""
        return self._first.find(key)

    def is_settled(self, key: str) -> bool:
        """True if every tracker received everything about a run."""
        return all(teller.is_settled(key) for teller in (self._first, *self._mirrors))

    def put(self, entry: RunEntry) -> None:
        """Queue a run for every tracker; mirrors get it without the first tracker's run id."""
        self._first.put(entry)
        for mirror in self._mirrors:
            mirror.put(entry.model_copy(update={"run_id": "", "told": ""}))

    def journal_grew(self, key: str) -> None:
        """Queue a stage with new journal records for every tracker."""
        for teller in (self._first, *self._mirrors):
            teller.journal_grew(key)

    def finish(self) -> None:
        """Finish all shippers."""
        for teller in (self._first, *self._mirrors):
            teller.finish()

    def close(self, deadline_s: float, upload_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Close all shippers; their deadlines run at the same time."""
        self.finish()
        began_at = time.monotonic() - waited_s
        for teller in (self._first, *self._mirrors):
            teller.close(deadline_s, upload_s, time.monotonic() - began_at)


class Recorder:
    """Records a pipeline run in the tracker: a parent run, and a child for each computed stage.

    A run with the same `identity` continues the tracker's run.
    """

    def __init__(
        self,
        shipper: Shipper | FanOut,
        *,
        identity: Mapping[str, str],
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        store_uri: str,
    ) -> None:
        self._shipper = shipper
        self._store_uri = store_uri
        self._owner = Owner.this_process()
        self.run_key = sha256_json(dict(identity))
        """Key of the pipeline run; repetitions of the run have the same key."""
        new = RunEntry(
            key=self.run_key,
            name=name,
            owner=self._owner,
            params=dict(params),
            tags={**tags, "pipeline": name},
        )
        self._before = shipper.find(self.run_key)
        self._run = (self._before or new).model_copy(
            update={"owner": self._owner, "state": "RUNNING"}
        )
        self._close_deadline_s, self._upload_deadline_s = CLOSE_DEADLINE_S, UPLOAD_DEADLINE_S
        shipper.begin()

    def stage_reused(
        self, request: StageRequest, record: CommitRecord, generation: int = 0
    ) -> None:
        """Record a stage that was found committed; `generation` is its first attempt's number."""
        entry = self._stage(request, generation)
        if not self._shipper.is_settled(entry.key):
            self._shipper.put(self._run)
            self._shipper.put(entry.committed(record))

    def stage_started(
        self, request: StageRequest, generation: int = 0, adopted: Adoption | None = None
    ) -> None:
        """Record that a stage starts, with the work that it adopted."""
        entry = self._stage(request, generation)
        self._shipper.put(self._run)
        self._shipper.put(entry.adopting(adopted) if adopted else entry)

    def stage_grew(self, request: StageRequest, generation: int = 0) -> None:
        """Record that a stage's journal has new records."""
        self._shipper.journal_grew(self._key(request, generation))

    def stage_finished(
        self, request: StageRequest, record: CommitRecord, generation: int = 0
    ) -> None:
        """Record that a stage was committed."""
        self._shipper.put(self._stage(request, generation).committed(record))

    def stage_ended(self, request: StageRequest, status: EndStatus, generation: int = 0) -> None:
        """Record that a stage failed or was cancelled."""
        self._shipper.put(self._stage(request, generation).model_copy(update={"state": status}))

    def run_finished(self, directory: Path, metrics: Mapping[str, float]) -> None:
        """Record the report directory and the headline metrics of the finished run."""
        self._run = self._run.model_copy(
            update={"state": "FINISHED", "metrics": dict(metrics), "files": directory}
        )
        before = self._before if self._shipper.is_settled(self._run.key) else None
        now = ("FINISHED", self._run.stages, self._run.metrics)
        if before is None or (before.state, before.stages, before.metrics) != now:
            self._shipper.put(self._run)

    def run_ended(self, status: EndStatus) -> None:
        """Record that the run failed or was cancelled; `close` then waits only a few seconds."""
        self._close_deadline_s, self._upload_deadline_s = CLOSE_IN_HASTE_S, 0.0
        if self._run.stages:
            self._shipper.put(self._run.model_copy(update={"state": status}))

    def close(self) -> None:
        """Wait until everything is sent or the deadline has passed; an interrupt shortens it."""
        try:
            self._shipper.close(self._close_deadline_s, self._upload_deadline_s)
        except (KeyboardInterrupt, SystemExit):
            self._shipper.close(CLOSE_IN_HASTE_S)
            raise

    def _key(self, request: StageRequest, generation: int) -> str:
        return sha256_json([self._store_uri, request.fingerprint, generation])

    def _stage(self, request: StageRequest, generation: int) -> RunEntry:
        key = self._key(request, generation)
        stages = {**self._run.stages, request.label: key}
        self._run = self._run.model_copy(update={"stages": stages})
        known = self._shipper.find(key)
        if known is not None:
            return known.model_copy(update={"owner": self._owner, "state": "RUNNING"})
        return RunEntry(
            key=key,
            name=request.label,
            fingerprint=request.fingerprint,
            generation=generation,
            parent=self._run.key,
            owner=self._owner,
            params=request.config.model_dump(mode="json"),
            tags={
                "stage": request.label,
                "fingerprint": request.fingerprint,
                "run_name": self._run.name,
            },
            inputs=dict(request.inputs),
        )


def end_status(error: BaseException) -> EndStatus:
    """Return `FAILED` for an exception, `KILLED` for SIGTERM or Ctrl-C."""
    return "FAILED" if isinstance(error, Exception) else "KILLED"


UPDATE_EVERY_S = 3.0
Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class RunPage:
    """Shows a stage's messages and progress on its Prefect run page; without one, logs messages."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._orchestrated = TaskRunContext.get() is not None
        self._logger: Logger = (
            get_run_logger() if self._orchestrated else logging.getLogger(f"rlhf.{label}")
        )
        self._artifact_id: UUID | None = None
        self._updated_at = -UPDATE_EVERY_S
        self._gave_up = False

    def log(self, message: str) -> None:
        """Write one line."""
        self._logger.info("%s", redact(message))

    def show(self, record: JournalRecord) -> None:
        """Show a journal record: its message as a line, its progress as a ring on the page."""
        if record.message:
            self.log(f"{self._label}  {record.message}")
        if record.kind == "progress" and record.done is not None and record.total:
            self._ring(100.0 * record.done / record.total)

    def close(self) -> None:
        """Show a finished stage as complete, if progress was shown."""
        self._updated_at = -UPDATE_EVERY_S
        if self._artifact_id is not None:
            self._ring(100.0)

    def _ring(self, percent: float) -> None:
        now = time.monotonic()
        if not self._orchestrated or self._gave_up or now - self._updated_at < UPDATE_EVERY_S:
            return
        self._updated_at = now
        try:
            if self._artifact_id is None:
                created = create_progress_artifact(
                    progress=percent,
                    key=f"progress-{self._label.replace('_', '-')}",
                    description=self._label,
                )
                self._artifact_id = created if isinstance(created, UUID) else None
            else:
                update_progress_artifact(artifact_id=self._artifact_id, progress=percent)
        except Exception as error:  # noqa: BLE001  the run page is optional
            self._gave_up = True
            self._logger.warning("progress is no longer shown on the run page: %s", error)
