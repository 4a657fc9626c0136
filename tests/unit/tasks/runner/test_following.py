"""Following a job: commits, refusals, deaths, silence and cancellation.

The job client is a stand-in that injects what a cluster does on a bad day; the journal, the
store, the attempts and the heartbeat are the real ones.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.config.stages import PromoteConfig, PromoteStageConfig, Runtime
from infra.errors import ConfigError, JobFailedError, JobSubmitError
from infra.ray.job_types import JobHandle, JobRequest, JobState, JobStatus
from infra.store.heartbeat import Heartbeat
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.journal import Journal, JournalRecord
from tasks.runner import following, submission
from tasks.runner.following import JobFollower
from tasks.runner.identity import StageRequest
from tasks.runner.run_page import RunPage
from tasks.runner.submission import Submission

REQUEST = StageRequest(PromoteStageConfig(promote=PromoteConfig()), inputs={}, seed=0)


class Jobs:
    """A job server that answers what the test wants."""

    def __init__(self, on_status: Callable[[], JobState], attached: bool = False) -> None:
        self._on_status = on_status
        self._attached = attached
        self.requests: list[JobRequest] = []
        self.first_attempts: list[int] = []
        self.stopped: list[str] = []

    def ensure(
        self,
        key: str,
        build_attempt: Callable[[int], JobRequest],
        is_alive: Callable[[int], bool],
        *,
        first_attempt: int = 0,
    ) -> JobHandle:
        self.first_attempts.append(first_attempt)
        if not self._attached:
            self.requests.append(build_attempt(first_attempt))
        return JobHandle(first_attempt, f"{key}-a{first_attempt}", self._attached)

    def status(self, submission_id: str) -> JobStatus:
        state = self._on_status()
        code = 137 if state == JobState.FAILED else None
        return JobStatus(submission_id, state, "", code, None, time.time(), None, {})

    def log_tail(self, submission_id: str, num_lines: int) -> str:
        return "the last line"

    def stop(self, submission_id: str, deadline_s: float) -> None:
        self.stopped.append(submission_id)


class Stage:
    """One stage's directories, as the task sees them."""

    def __init__(self, tmp_path: Path) -> None:
        self.storage = LocalStorage(tmp_path / "store")
        self.submission = Submission(
            request=REQUEST,
            work_dir=tmp_path / "work" / REQUEST.fingerprint,
            store_uri=self.storage.uri,
            runtime=Runtime(),
            metadata={"flow_run_id": "f"},
        )
        self.said: list[str] = []
        self.records: list[JournalRecord] = []
        self.scratch = tmp_path / "scratch"

    def follow(self, jobs: Jobs) -> CommitRecord:
        follower = JobFollower(
            label="promote",
            fingerprint=REQUEST.fingerprint,
            submission=self.submission,
            storage=self.storage,
            page=RunPage("promote"),
            say=self.said.append,
        )
        return follower.follow(jobs, self.records.append)  # type: ignore[arg-type]

    def commit(self) -> None:
        self.scratch.mkdir()
        (self.scratch / "decision.json").write_text("{}")
        artifact = self.storage.publish(self.scratch, "promotion", REQUEST.fingerprint)
        self.storage.commit(
            CommitRecord(
                fingerprint=REQUEST.fingerprint,
                stage="promote",
                artifact=artifact,
                attempt=0,
                committed_at="2026-01-01T00:00:00+00:00",
            )
        )

    def fail(self, kind: str, message: str, exit_code: int) -> None:
        path = self.submission.attempt_dir(0)
        path.mkdir(parents=True, exist_ok=True)
        error = {"type": kind, "message": message, "exit_code": exit_code}
        (path / "error.json").write_text(json.dumps(error))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(following, "STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "COMMIT_GRACE_S", 0.3)
    return Stage(tmp_path)


def after(num_calls: int, then: Callable[[], JobState]) -> Callable[[], JobState]:
    calls = iter(range(num_calls))

    def status() -> JobState:
        return JobState.RUNNING if next(calls, None) is not None else then()

    return status


def test_a_job_is_followed_to_its_commit_and_its_journal_is_passed_on(stage: Stage) -> None:
    def work() -> JobState:
        with Journal(stage.submission.journal_path) as journal:
            journal.metrics(1, {"train/loss": 0.5})
            journal.progress(1, 1, "step 1/1")
        stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(after(2, work))
    record = stage.follow(jobs)
    assert record.stage == "promote"
    assert [each.kind for each in stage.records] == ["metrics", "progress"]
    spec = StageSpec.model_validate_json(Path(jobs.requests[0].argv[-1]).read_bytes())
    assert spec.fingerprint == REQUEST.fingerprint
    assert spec.attempt == 0
    assert jobs.requests[0].metadata["flow_run_id"] == "f"
    assert stage.said == [f"submitted promote-{REQUEST.fingerprint[:16]}-a0"]


def test_history_is_not_told_again_when_attaching(stage: Stage) -> None:
    with Journal(stage.submission.journal_path) as journal:
        journal.metrics(7, {"train/loss": 0.5})

    def work() -> JobState:
        with Journal(stage.submission.journal_path) as journal:
            journal.metrics(8, {"train/loss": 0.4})
        stage.commit()
        return JobState.SUCCEEDED

    stage.follow(Jobs(after(1, work), attached=True))
    assert [record.step for record in stage.records] == [8]
    assert stage.said[0] == "earlier attempts reached step 7"
    assert stage.said[1].startswith("attached to promote-")


def test_a_refusal_of_the_job_is_the_same_one_line(stage: Stage) -> None:
    def refuse() -> JobState:
        stage.fail("ConfigError", "promote.metric: got 'x'; need one of: accuracy", 2)
        return JobState.FAILED

    with pytest.raises(ConfigError) as caught:
        stage.follow(Jobs(after(1, refuse)))
    assert str(caught.value) == "promote.metric: got 'x'; need one of: accuracy"


def test_a_crash_carries_the_reason_and_the_log(stage: Stage) -> None:
    def crash() -> JobState:
        stage.fail("ValueError", "no such thing", 1)
        return JobState.FAILED

    with pytest.raises(JobFailedError) as caught:
        stage.follow(Jobs(after(1, crash)))
    assert "ValueError: no such thing\n    the last line" in str(caught.value)


def test_a_killed_job_says_so_and_the_next_attempt_gets_a_new_number(stage: Stage) -> None:
    with pytest.raises(JobFailedError, match="was killed .exit code 137"):
        stage.follow(Jobs(lambda: JobState.FAILED))
    stage.fail("RuntimeError", "x", 1)
    jobs = Jobs(lambda: JobState.FAILED)
    with pytest.raises(JobFailedError):
        stage.follow(jobs)
    assert jobs.first_attempts == [1]


def test_ray_says_it_failed_but_the_commit_is_there(stage: Stage) -> None:
    def commit_and_fail() -> JobState:
        stage.commit()
        return JobState.FAILED

    assert stage.follow(Jobs(after(1, commit_and_fail))).stage == "promote"


def test_a_silent_job_is_stopped_and_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "HEARTBEAT_STALE_S", 0.2)
    monkeypatch.setattr(submission, "HEARTBEAT_STALE_S", 0.2)
    attempt_dir = stage.submission.attempt_dir(0)
    attempt_dir.mkdir(parents=True)
    with Heartbeat(attempt_dir / "heartbeat.json", every_s=0.05):
        pass
    jobs = Jobs(lambda: JobState.RUNNING)
    started = time.monotonic()
    with pytest.raises(JobFailedError, match="gave no sign of life"):
        stage.follow(jobs)
    assert len(jobs.stopped) == 1
    assert time.monotonic() - started < 5.0


def test_a_lost_head_is_no_verdict_while_the_job_beats(stage: Stage) -> None:
    attempt_dir = stage.submission.attempt_dir(0)
    attempt_dir.mkdir(parents=True)
    calls = iter(range(20))

    def status() -> JobState:
        if next(calls, None) is None:
            stage.commit()
            return JobState.SUCCEEDED
        raise JobSubmitError("Ray does not answer")

    with Heartbeat(attempt_dir / "heartbeat.json", every_s=0.05):
        assert stage.follow(Jobs(status)).stage == "promote"


def test_ctrl_c_stops_the_job_and_a_crash_of_ours_does_not(stage: Stage) -> None:
    def interrupt() -> JobState:
        raise KeyboardInterrupt

    def crash() -> JobState:
        raise MemoryError

    jobs = Jobs(after(1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        stage.follow(jobs)
    assert len(jobs.stopped) == 1
    jobs = Jobs(after(1, crash))
    with pytest.raises(MemoryError):
        stage.follow(jobs)
    assert jobs.stopped == []
