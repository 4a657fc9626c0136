"""Shows log lines and progress of a stage on its Prefect run page.

Promises: outside a Prefect run, everything goes to a plain logger. A slow or missing Prefect server
costs a stage one warning and no work.
Does not promise: that a follower is not delayed. Prefect's client retries for up to a minute, in
which the follower waits but the job does not.
"""

import logging
import time
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from infra.redact import redact
from infra.tracking.journal import JournalRecord

UPDATE_EVERY_S = 3.0
Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class RunPage:
    """The run page of one stage; its label is used in the artifact's key."""

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
        """Show a journal record: its message as a line, its progress as the ring."""
        if record.message:
            self.log(f"{self._label}  {record.message}")
        if record.kind == "progress" and record.done is not None and record.total:
            self._ring(100.0 * record.done / record.total)

    def close(self) -> None:
        """Fill the ring of a finished stage."""
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
