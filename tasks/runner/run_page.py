"""Log lines and progress of a stage on its Prefect run page.

Promises: outside a Prefect run everything here goes to the plain logger instead; a Prefect server
that is slow or gone costs a stage one warning and no work.
Does not promise: news in the meantime. Prefect's client tries again for up to a minute, and who
follows the job waits for it; the job does not.
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
    """The run page of one stage.

    Args:
        label: name of the stage, used as the artifact's key.
    """

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
        """One line."""
        self._logger.info("%s", redact(message))

    def show(self, record: JournalRecord) -> None:
        """One journal record: its message as a line, its progress as the ring."""
        if record.message:
            self.log(f"{self._label}  {record.message}")
        if record.kind == "progress" and record.done is not None and record.total:
            self._ring(100.0 * record.done / record.total)

    def close(self) -> None:
        """The stage is done: the ring is full."""
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
        except Exception as error:  # noqa: BLE001  the run page is a courtesy: a stage outlives it
            self._gave_up = True
            self._logger.warning("progress is no longer shown on the run page: %s", error)
