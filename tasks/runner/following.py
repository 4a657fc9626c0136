"""Following a stage's job from its submission to its commit.

Promises: the store's commit record alone says that a stage is done; Ray's job status and the
job's heartbeat only say whether it still makes sense to wait. Leaving on a cancellation stops
the job; leaving for any other reason leaves it running for the next run to attach to.
"""

import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from infra.errors import (
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    ConfigError,
    DeadlineError,
    JobError,
    JobFailedError,
)
from infra.ray.job_types import JobHandle
from infra.ray.jobs import RayJobs
from infra.store.stage_spec import CommitRecord
from infra.store.storage import Storage
from infra.tracking.journal import JournalRecord, read_records
from tasks.runner.cancellation import run_is_cancelled
from tasks.runner.run_page import RunPage
from tasks.runner.submission import HEARTBEAT_STALE_S, Submission

POLL_S = 0.2
STATUS_EVERY_S = 1.0
STOP_DEADLINE_S = 20.0
LOG_TAIL_LINES = 20
EXIT_KILLED = 128 + signal.SIGKILL
COMMIT_GRACE_S = 5.0
"""A job that Ray calls finished may have committed after our last look at the store."""

_log = logging.getLogger(__name__)


class JobFollower:
    """Brings one stage's job to its commit.

    Args:
        label: name of the stage.
        fingerprint: what the job commits.
        submission: where attempts live.
        storage: where the commit appears.
        page: where a person looks.
        say: tells whoever watches the run what happens to the job.
    """

    def __init__(
        self,
        *,
        label: str,
        fingerprint: str,
        submission: Submission,
        storage: Storage,
        page: RunPage,
        say: Callable[[str], None],
    ) -> None:
        self._label = label
        self._fingerprint = fingerprint
        self._submission = submission
        self._storage = storage
        self._page = page
        self._watcher = say
        self._offset = 0

    def follow(self, jobs: RayJobs, on_record: Callable[[JournalRecord], None]) -> CommitRecord:
        """Submit or attach, then wait for the commit.

        Args:
            jobs: the job client.
            on_record: gets every journal record written from now on.

        Returns:
            The commit record, its artifact verified.

        Raises:
            ConfigError: the job refused its configuration or input.
            JobFailedError: the job ended, or fell silent, without a commit.
        """
        self._skip_history()
        job = jobs.ensure(
            self._submission.key,
            self._submission.build_attempt,
            self._submission.is_alive,
            first_attempt=self._submission.first_attempt(),
        )
        verb = "attached to" if job.attached else "submitted"
        self._say(f"{verb} {job.submission_id}")
        try:
            return self._wait(jobs, job, on_record)
        except BaseException as error:
            # SIGTERM and Ctrl-C arrive here as exceptions, in whatever we happen to be doing.
            if isinstance(error, KeyboardInterrupt) or run_is_cancelled(error):
                self._say(f"cancelled; stopping {job.submission_id}")
                self._stop(jobs, job)
            raise

    def _wait(
        self,
        jobs: RayJobs,
        job: JobHandle,
        on_record: Callable[[JournalRecord], None],
    ) -> CommitRecord:
        status_at = time.monotonic() + STATUS_EVERY_S
        while True:
            self._pump(on_record)
            record = self._storage.committed(self._fingerprint)
            if record is not None:
                self._pump(on_record)
                return record
            if time.monotonic() >= status_at:
                status_at = time.monotonic() + STATUS_EVERY_S
                ended = self._check(jobs, job)
                if ended:
                    return self._last_look(jobs, job, on_record)
            time.sleep(POLL_S)

    def _skip_history(self) -> None:
        """Lines of earlier attempts were shown by the run that followed them."""
        records, self._offset = read_records(self._submission.journal_path, 0)
        steps = [record.step for record in records if record.step is not None]
        if steps:
            self._say(f"earlier attempts reached step {max(steps)}")

    def _pump(self, on_record: Callable[[JournalRecord], None]) -> None:
        records, self._offset = read_records(self._submission.journal_path, self._offset)
        for record in records:
            self._page.show(record)
            on_record(record)

    def _check(self, jobs: RayJobs, job: JobHandle) -> bool:
        """Whether the job has ended; a job that fell silent is stopped, and fails."""
        silence_s = self._submission.silence_s(job.attempt)
        try:
            status = jobs.status(job.submission_id)
        except JobError as error:
            # A lost head says nothing about the job: its heartbeat and its commit do.
            if silence_s < HEARTBEAT_STALE_S:
                _log.debug("%s: %s", job.submission_id, error)
                return False
            raise
        if status.is_terminal:
            return True
        if silence_s >= HEARTBEAT_STALE_S:
            self._stop(jobs, job)
            raise JobFailedError(
                f"{self._label}: job {job.submission_id} gave no sign of life for "
                f"{silence_s:.0f} s and was stopped; run again to resume{self._tail(jobs, job)}"
            )
        return False

    def _last_look(
        self,
        jobs: RayJobs,
        job: JobHandle,
        on_record: Callable[[JournalRecord], None],
    ) -> CommitRecord:
        """The job has ended: its commit, or the reason why there is none."""
        deadline = time.monotonic() + COMMIT_GRACE_S
        error_path = self._submission.attempt_dir(job.attempt) / "error.json"
        while time.monotonic() < deadline:
            record = self._storage.committed(self._fingerprint)
            if record is not None:
                self._pump(on_record)
                return record
            if error_path.exists():
                break
            time.sleep(POLL_S)
        self._pump(on_record)
        raise self._failure(jobs, job, error_path)

    def _failure(self, jobs: RayJobs, job: JobHandle, error_path: Path) -> Exception:
        where = f"{self._label}: job {job.submission_id}"
        try:
            error = json.loads(error_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return JobFailedError(f"{where} {_end(jobs, job)}{self._tail(jobs, job)}")
        if error["exit_code"] == EXIT_USER_ERROR:
            path, _, problem = str(error["message"]).partition(": ")
            return ConfigError(path, problem)
        if error["exit_code"] == EXIT_TERMINATED:
            return JobFailedError(f"{where} was stopped; run again to resume")
        reason = f"{error['type']}: {error['message']}"
        return JobFailedError(f"{where}: {reason}{self._tail(jobs, job)}")

    def _tail(self, jobs: RayJobs, job: JobHandle) -> str:
        try:
            tail = jobs.log_tail(job.submission_id, LOG_TAIL_LINES)
        except JobError:
            return ""
        return "".join(f"\n    {line}" for line in tail.splitlines())

    def _say(self, text: str) -> None:
        self._page.log(f"{self._label}  {text}")
        self._watcher(text)

    def _stop(self, jobs: RayJobs, job: JobHandle) -> None:
        try:
            jobs.stop(job.submission_id, STOP_DEADLINE_S)
        except (JobError, DeadlineError) as error:
            self._say(f"{job.submission_id} could not be stopped: {error}")


def _end(jobs: RayJobs, job: JobHandle) -> str:
    """How a job ended that could not say so itself."""
    try:
        status = jobs.status(job.submission_id)
    except JobError as error:
        return f"ended, and Ray forgot it: {error}"
    if status.exit_code == EXIT_KILLED:
        return "was killed (exit code 137; out of memory?); run again to resume"
    if status.exit_code is not None:
        return f"ended with exit code {status.exit_code} and no output"
    return f"ended as {status.state} and no output"
