"""One stage as the task that follows its job sees it, and a job server that injects bad days."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.config.sections import PromoteConfig
from engines.config.stages.base import Runtime
from engines.config.stages.final import PromoteStageConfig
from infra.ray.api import JobRequest, JobState, JobStatus
from infra.store.heartbeat import Heartbeat
from infra.store.stage_log import Attempt, Holder
from infra.store.stage_spec import CommitRecord
from infra.store.storage import LocalStorage
from infra.store.work_channel import JobProblem
from infra.tracking.journal import Journal, JournalRecord
from tasks.runner.following import JobFollower
from tasks.runner.recorder import RunPage
from tasks.runner.run import StageRequest
from tasks.runner.submission import Submission

HOLDER = Holder(id="another", process="elsewhere")
REQUEST = StageRequest(PromoteStageConfig(promote=PromoteConfig()), given={}, seed=0)


class Clock:
    """Time of the thread that made it, which passes only while that thread sleeps.

    Stands for the module `time` in what is tested; other threads have the real one.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._now_s = time.monotonic()
        self.on_sleep: list[Callable[[], None]] = []
        """What happens elsewhere in the meantime."""

    def monotonic(self) -> float:
        here = threading.current_thread() is self._thread
        return self._now_s if here else time.monotonic()

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            time.sleep(seconds)
            return
        self._now_s += seconds
        for happens in self.on_sleep:
            happens()


class Jobs:
    """A job server that answers what the test wants; a name is taken for as long as it lives."""

    cluster_id = HOLDER.cluster

    def __init__(self, on_status: Callable[[], JobState | None], code: int = 137) -> None:
        self._on_status, self._code = on_status, code
        self.requests: dict[str, JobRequest] = {}
        self.stopped: list[str] = []

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        if submission_id in self.requests:
            return False
        self.requests[submission_id] = request
        return True

    def look(self, submission_id: str) -> JobStatus | None:
        state = self._on_status()
        code = self._code if state == JobState.FAILED else None
        if state is None:
            return None
        return JobStatus(submission_id, state, "", code, {})

    status = look

    def log_tail(self, submission_id: str) -> str:
        return "the last line"

    def stop(self, submission_id: str, deadline_s: float) -> None:
        self.stopped.append(submission_id)


class Stage:
    """One stage, as the task sees it."""

    def __init__(self, tmp_path: Path, clock: Clock) -> None:
        self.clock = clock
        self.storage = LocalStorage(tmp_path / "store")
        self.channel = self.storage.channel(REQUEST.fingerprint)
        self.said: list[str] = []
        self.records: list[JournalRecord] = []
        self.scratch = tmp_path / "scratch"

    def follow(
        self, jobs: Jobs, *, force: str = "", follower: str = "me", ours: bool = False
    ) -> CommitRecord:
        submission = Submission(
            request=REQUEST,
            storage=self.storage,
            runtime=Runtime(),
            metadata={"flow_run_id": "f"},
            follower=follower,
            run_key="a" * 64,
        )
        return JobFollower(
            submission,
            force=force,
            page=RunPage("promote"),
            say=self.said.append,
            on_stand=lambda log: None,
            ours=ours,
        ).follow(jobs, self.records.append)  # type: ignore[arg-type]

    def hold(self, number: int = 0, ray_job: str = "another-a0") -> None:
        """As another run that submitted a job, or as the job of the stage before."""
        holder = HOLDER.model_copy(update={"ray_job": ray_job})
        self.storage.attempts.hold(REQUEST.fingerprint, holder, number)

    def journal(self, attempt: int = 0) -> Journal:
        return Journal(self.channel.local_dir(attempt) / "journal.jsonl")

    @contextmanager
    def heartbeat(self, attempt: int = 0) -> Iterator[None]:
        """Beats whenever the clock goes on; its own thread comes to none."""
        path = self.channel.local_dir(attempt) / "heartbeat"
        with Heartbeat(path, every_s=3600.0) as heartbeat:
            self.clock.on_sleep.append(heartbeat._beat)
            yield
            self.clock.on_sleep.remove(heartbeat._beat)

    def commit(self, content: str = "{}") -> None:
        """As the job of the last attempt."""
        self.scratch.mkdir()
        (self.scratch / "decision.json").write_text(content)
        last = self.storage.attempts.entries(REQUEST.fingerprint)[-1]
        self.storage.commit(
            Attempt(REQUEST.fingerprint, last.number, last.holder.id),
            CommitRecord(
                fingerprint=REQUEST.fingerprint,
                stage="promote",
                artifact=self.storage.publish(self.scratch, "promotion"),
                attempt=last.number,
                committed_at="2026-01-01T00:00:00+00:00",
            ),
        )

    def fail(self, kind: str, message: str, exit_code: int) -> None:
        problem = JobProblem(type=kind, message=message, exit_code=exit_code)
        self.channel.write_error(0, problem)


def after(num_calls: int, then: Callable[[], JobState | None]) -> Callable[[], JobState | None]:
    calls = iter(range(num_calls))

    def status() -> JobState | None:
        return JobState.RUNNING if next(calls, None) is not None else then()

    return status
