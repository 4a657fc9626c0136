"""Follows a stage's job from its claim to its commit.

Promises: the stage log alone decides which attempt owns the stage, and that it is done. Ray's
status and the heartbeat only decide how long to wait. Silence is measured by this process's clock
while it can access the channel. Unless at the start or in a submission, a failing store is retried
for `STORE_AWAY_S`. A run stops a silent job. A cancelled run stops its job if no other follows it.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from prefect.exceptions import TerminationSignal

from infra.errors import (
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    ArtifactError,
    ConfigError,
    DeadlineError,
    FencedError,
    JobError,
    JobFailedError,
)
from infra.ray.api import JobState
from infra.ray.jobs import RayJobs
from infra.redact import redact
from infra.store.heartbeat import Beat, BeatWatch
from infra.store.process_stamp import is_dead
from infra.store.stage_log import LogEntry, latest_commit
from infra.store.stage_spec import CommitRecord
from infra.store.work_channel import JobProblem
from infra.tracking.journal import JournalRecord, read_journal
from infra.waiting import when_it_answers
from tasks.runner.memory_knobs import memory_knobs
from tasks.runner.recorder import RunPage
from tasks.runner.submission import STOP_DEADLINE_S, Submission, run_is_cancelled

POLL_S = 0.2
STATUS_EVERY_S = 1.0
HEARTBEAT_STALE_S = 60.0
"""Silence after which a job counts as dead; it beats every `Runtime.heartbeat_s` seconds."""
START_GRACE_S = 300.0
"""Time limit to the first heartbeat, without the time that the job is pending."""
LOST_GRACE_S = 45.0
"""Time that a job without a heartbeat may be unknown to Ray; longer than a submission takes."""
STORE_AWAY_S = 600.0
"""Time that the store may fail continuously before the run ends; the job continues."""
QUEUED_TOLD_S = 15.0
EXIT_KILLED = {128 + signal.SIGKILL, -signal.SIGKILL}
"""Exit status of a killed process, as reported by a shell and by Ray."""
MEMORY = "out of memory?"
NUM_KNOBS = 4
"""Number of settings that an error suggests; `rlhf diagnose` names all."""
COMMIT_GRACE_S = 5.0
"""Wait for the commit of a job that Ray reports as finished."""

Value = TypeVar("Value")
OnRecord = Callable[[JournalRecord], None]

_log = logging.getLogger(__name__)


class _Verdict(Enum):
    """State of an attempt at the last look."""

    ALIVE = auto()
    ENDED = auto()
    SILENT = auto()
    PASSED = auto()
    """The log has a later entry: the attempt's commit, or another attempt."""


def _stopwatch() -> BeatWatch:
    """Return a stopwatch: its `silence_s` sums the time between looks, without skipped gaps."""
    return BeatWatch(lambda: None)


@dataclass
class _Job:
    attempt: int
    name: str
    attached: bool
    watch: BeatWatch
    judged_at: float
    """Time of the last query to Ray, on the monotonic clock."""
    is_here: bool
    """True if the attempt runs on this run's cluster; Ray does not know jobs of other clusters."""
    lost: BeatWatch = field(default_factory=_stopwatch)
    """Time since Ray last knew the job."""
    queued: BeatWatch = field(default_factory=_stopwatch)
    """Time that the job has waited for resources of the cluster."""
    is_told: bool = False
    """True if the waiting was reported."""


class JobFollower:
    """Brings one stage's job to its commit.

    Args:
        force: token of the wanted generation; empty accepts any commit.
        say: called with a line about each event of the job.
        on_stand: called with the log up to the attempt that owns the stage, before the wait for it.
        ours: True if a job that this run followed began the stage; then its earlier records and its
            failure are reported.
    """

    def __init__(
        self,
        submission: Submission,
        *,
        force: str,
        page: RunPage,
        say: Callable[[str], None],
        on_stand: Callable[[Sequence[LogEntry]], None],
        ours: bool = False,
    ) -> None:
        self._submission = submission
        self._label = submission.request.label
        self._fingerprint = submission.request.fingerprint
        self._storage = submission.storage
        self._channel = submission.channel
        self._log = partial(self._storage.attempts.entries, self._fingerprint)
        self._lookup = partial(self._storage.lookup, self._fingerprint, force)
        self._force = force
        self._page = page
        self._watcher, self._on_stand = say, on_stand
        self._ours = ours
        self._positions: dict[int, int] = {}
        self._unshown: deque[JournalRecord] = deque()
        self.ray_job = ""
        """Name of the job that was waited for last."""
        self.others_wait = False
        """True if a cancelled job continues because it has another follower."""

    def follow(self, jobs: RayJobs, on_record: OnRecord) -> CommitRecord:
        """Submit or attach, then wait for the commit.

        Raises:
            ConfigError: the job refused its configuration or input.
            JobError: Ray refused the job, or the job ended or fell silent without a commit.
            OSError: the store failed at the first request or submission, or for `STORE_AWAY_S`.
        """
        self._storage.attempts.join(self._fingerprint, self._submission.follower)
        is_interrupted = is_terminated = False
        try:
            if not self._ours:
                self._ask(self._skip_history)
            while True:
                # The stage may be done by now; then no other attempt must begin.
                record = self._ask(self._lookup)
                job = self._stand(jobs) if record is None else None
                if job is not None:
                    record = self._wait(jobs, job, on_record)
                if record is not None:
                    self._ask(partial(self._read, record.attempt))
                    self._show(on_record)
                    return record
                self._ours = False  # the next attempt is a job of its own
        # Ctrl-C and SIGTERM arrive here as exceptions, at any point of the work.
        except KeyboardInterrupt:
            is_interrupted = True
            raise
        except TerminationSignal:
            is_terminated = True
            raise
        finally:
            num_others = self._leave()  # before a question to a server that may be slow
            if is_interrupted or (is_terminated and run_is_cancelled()):
                self._cancel(jobs, num_others)

    def _ask(self, ask: Callable[[], Value]) -> Value:
        return when_it_answers(ask, f"{self._label}: {self._submission.store_uri}", STORE_AWAY_S)

    def _leave(self) -> int:
        """Stop following; return the number of other followers, or 0 if the store fails."""
        try:
            return self._storage.attempts.leave(self._fingerprint, self._submission.follower)
        except (ArtifactError, OSError) as error:
            _log.warning("%s: cannot tell who else waits: %s", self._label, redact(str(error)))
            return 0

    def _stand(self, jobs: RayJobs) -> _Job | None:
        """Return the attempt that owns the stage, or a new one; None if the stage is done."""
        while True:
            log = self._ask(self._log)
            if latest_commit(log, self._force) is not None:
                return None
            held = log[-1] if log and log[-1].kind == "held" else None
            attached = held is not None and not self._ask(partial(self._is_over, jobs, held))
            attempt = held.number if held is not None and attached else len(log)
            try:
                if not attached:
                    self._ours = False
                    # Not retried, because each try is an attempt in the log.
                    self._submission.submit(jobs, attempt, self._force)
            except FencedError:
                continue  # another process claimed it first
            log = self._ask(self._log)[: attempt + 1]
            self.ray_job = name = log[attempt].holder.ray_job
            self._say(f"{'attached to' if attached else 'submitted'} {name}")
            self._on_stand(log)
            is_here = log[attempt].holder.cluster == jobs.cluster_id
            watch = self._watch(attempt)
            return _Job(attempt, name, attached, watch, time.monotonic(), is_here)

    def _is_over(self, jobs: RayJobs, held: LogEntry) -> bool:
        """Return True if an attempt is certainly over, without waiting for silence."""
        problem = self._channel.read_error(held.number)
        if problem is not None:
            # A failure of this run's own job is reported, not retried, unless it was stopped.
            return not self._ours or problem.exit_code == EXIT_TERMINATED
        beat = self._channel.read_beat(held.number)
        if beat is not None and is_dead(beat.process):
            return True
        try:
            status = jobs.look(held.holder.ray_job)
        except JobError:
            return False
        if status is not None:
            return status.is_terminal
        # If the holder is dead, the attempt was never submitted.
        is_here = held.holder.cluster == jobs.cluster_id
        return is_here and beat is None and is_dead(held.holder.process)

    def _wait(self, jobs: RayJobs, job: _Job, on_record: OnRecord) -> CommitRecord | None:
        while True:
            verdict = self._ask(partial(self._turn, jobs, job))
            self._show(on_record)
            if verdict is _Verdict.PASSED:
                return self._ask(self._lookup)
            if verdict is _Verdict.ENDED:
                try:
                    return self._ask(partial(self._last_look, jobs, job))
                finally:
                    self._show(on_record)
            if verdict is _Verdict.SILENT:
                return self._give_up(jobs, job)
            time.sleep(POLL_S)

    def _turn(self, jobs: RayJobs, job: _Job) -> _Verdict:
        try:
            self._read(job.attempt)
            if len(self._log()) > job.attempt + 1:
                return _Verdict.PASSED
            job.watch.look()
            if time.monotonic() < job.judged_at + STATUS_EVERY_S:
                return _Verdict.ALIVE
            verdict = self._judge(jobs, job)
        except OSError:
            for watch in (job.watch, job.lost, job.queued):
                watch.skip()
            raise
        job.judged_at = time.monotonic()
        return verdict

    def _watch(self, attempt: int) -> BeatWatch:
        """Watch the heartbeat of an attempt; joining tests that the channel can be written, too."""

        def look() -> Beat | None:
            self._storage.attempts.join(self._fingerprint, self._submission.follower)
            return self._channel.read_beat(attempt)

        return BeatWatch(look)

    def _judge(self, jobs: RayJobs, job: _Job) -> _Verdict:
        beat = job.watch.beat
        if self._channel.read_error(job.attempt) or (beat is not None and is_dead(beat.process)):
            return _Verdict.ENDED
        try:
            status = jobs.look(job.name)
        except JobError as error:
            # An unreachable head says nothing about the job.
            _log.debug("%s: %s", job.name, error)
            status = None
        if status is not None and status.is_terminal:
            return _Verdict.ENDED
        if beat is not None:
            silent = job.watch.silence_s >= HEARTBEAT_STALE_S
        elif status is None and job.is_here:
            silent = job.lost.look() >= LOST_GRACE_S
        else:
            job.lost = _stopwatch()
            if status and status.state == JobState.PENDING:  # Ray itself ends a job that never fits
                job.watch = self._watch(job.attempt)
                # Every job is pending for a few seconds.
                if job.queued.look() >= QUEUED_TOLD_S and not job.is_told:
                    job.is_told = True
                    resources = self._submission.request.config.driver_resources
                    needs = ", ".join(f"{name} {amount}" for name, amount in resources.items())
                    self._say(f"{job.name} waits until the cluster has room for it ({needs})")
            silent = job.watch.silence_s >= START_GRACE_S
        return _Verdict.SILENT if silent else _Verdict.ALIVE

    def _give_up(self, jobs: RayJobs, job: _Job) -> None:
        """End a silent job; raise if this process submitted the job, else return to replace it."""
        message = f"gave no sign of life for {max(job.watch.silence_s, job.lost.silence_s):.0f} s"
        problem = JobProblem(type="SilentJobError", message=message, exit_code=1)
        try:
            self._channel.write_error(job.attempt, problem)
        finally:  # a full disk must not keep it alive
            self._stop(jobs, job.name)
        if job.attached:
            self._say(f"{job.name} {message}; taking over")
            return
        raise JobFailedError(
            f"{self._label}: job {job.name} {message} and was stopped; run again to resume"
            f"{self._tail(jobs, job)}"
        )

    def _skip_history(self) -> None:
        records, self._positions = read_journal(self._storage, self._fingerprint)
        step = max((record.step for record in records if record.step is not None), default=None)
        if step is not None:
            self._say(f"earlier attempts reached step {step}")

    def _read(self, attempt: int) -> None:
        records, self._positions = read_journal(
            self._storage, self._fingerprint, self._positions, attempt
        )
        self._unshown += records

    def _show(self, on_record: OnRecord) -> None:
        """Show records outside of store accesses, whose errors are retried."""
        while self._unshown:
            record = self._unshown.popleft()
            self._page.show(record)
            on_record(record)

    def _last_look(self, jobs: RayJobs, job: _Job) -> CommitRecord | None:
        """Return the commit after a job ended, None to look again, or raise the job's failure."""
        deadline = time.monotonic() + COMMIT_GRACE_S
        problem = None
        while problem is None and time.monotonic() < deadline:
            if len(self._log()) > job.attempt + 1:
                return self._lookup()
            problem = self._channel.read_error(job.attempt)
            if problem is None:
                time.sleep(POLL_S)
        self._read(job.attempt)
        if problem is None and self._ours and job.watch.beat is None:
            return None  # claimed by the job of the stage before, and never begun
        raise self._failure(jobs, job, problem)

    def _failure(self, jobs: RayJobs, job: _Job, problem: JobProblem | None) -> Exception:
        where = f"{self._label}: job {job.name}"
        if problem is None:
            told = _end(jobs, job.name)
            if MEMORY in told:
                told += f"; {self._knobs(job.watch.beat.phase if job.watch.beat else '')}"
            return JobFailedError(f"{where} {told}{self._tail(jobs, job)}")
        if problem.exit_code == EXIT_USER_ERROR:
            path, _, text = problem.message.partition(": ")
            return ConfigError(path, text)
        if problem.exit_code == EXIT_TERMINATED:
            return JobFailedError(f"{where} was stopped; run again to resume")
        reason = f"{problem.type}: {problem.message}"
        if problem.cause == "out_of_memory":
            reason = f"{reason}; {self._knobs(problem.phase)}"
        return JobFailedError(f"{where}: {reason}{self._tail(jobs, job)}")

    def _knobs(self, phase: str) -> str:
        knobs = memory_knobs(self._submission.request.config, phase)[:NUM_KNOBS]
        return f"to save memory: {', '.join(knobs)}" if knobs else "no setting saves memory"

    def _tail(self, jobs: RayJobs, job: _Job) -> str:
        try:
            tail = jobs.log_tail(job.name)
        except JobError:
            return ""
        return "".join(f"\n    {line}" for line in tail.splitlines())

    def _say(self, text: str) -> None:
        self._page.log(f"{self._label}  {text}")
        self._watcher(text)

    def _cancel(self, jobs: RayJobs, num_others: int) -> None:
        """Stop the attempt that the log names last, unless others wait for it."""
        try:
            log = self._log()
            name = log[-1].holder.ray_job if log and log[-1].kind == "held" else ""
        except (ArtifactError, OSError):
            name = self.ray_job  # the log is unreadable: the job that was waited for last
        self.others_wait = bool(name) and num_others > 0
        if self.others_wait:
            self._say(f"cancelled; {name} goes on: {num_others} others wait for it")
        elif name:
            self._say(f"cancelled; stopping {name}")
            self._stop(jobs, name)

    def _stop(self, jobs: RayJobs, name: str) -> None:
        try:
            jobs.stop(name, STOP_DEADLINE_S)
        except (JobError, DeadlineError) as error:
            self._say(f"{name} could not be stopped: {error}")


def _end(jobs: RayJobs, name: str) -> str:
    try:
        status = jobs.status(name)
    except JobError as error:
        return f"ended, and Ray has no status of it: {error}"
    if status.exit_code in EXIT_KILLED:
        return f"was killed (exit code {status.exit_code}; {MEMORY}); run again to resume"
    if status.exit_code is not None:
        return f"ended with exit code {status.exit_code} and no output"
    return f"ended as {status.state} and no output"
