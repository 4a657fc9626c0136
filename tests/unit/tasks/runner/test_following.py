"""Following a job: commits, refusals, deaths and cancellation.

The job client is a stand-in that injects what a cluster does on a bad day; the journal, the
store, the attempts and the heartbeat are the real ones.
"""

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from followed_stage import REQUEST, Jobs, Stage, after

from engines.config.stages.base import StageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import load_recipe
from infra import env, waiting
from infra.errors import (
    ArtifactCorruptError,
    ConfigError,
    JobFailedError,
    JobSubmitError,
    StoreUnreachableError,
)
from infra.ray.api import JobState, JobStatus
from infra.store.work_channel import JobProblem
from infra.tracking.journal import JournalRecord
from tasks.runner import following
from tasks.runner.memory_knobs import memory_knobs
from tasks.runner.recorder import RunPage
from tasks.runner.submission import stop_followed


def test_job_is_followed_to_commit_and_its_journal_forwarded(stage: Stage) -> None:
    def work() -> JobState:
        with stage.journal() as journal:
            journal.metrics(1, {"train/loss": 0.5})
            journal.progress(1, 1, "step 1/1")
        stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(after(2, work))
    record = stage.follow(jobs)
    assert record.stage == "promote"
    assert [each.kind for each in stage.records] == ["metrics", "progress"]
    holder = stage.storage.attempts.entries(REQUEST.fingerprint)[0].holder
    name = f"promote-{REQUEST.fingerprint[:16]}-{stage.storage.name}-a0-{holder.id[:8]}"
    assert (list(jobs.requests), holder.ray_job) == ([name], name)
    assert jobs.requests[name].argv[-3:] == [stage.storage.uri, REQUEST.fingerprint, "0"]
    assert stage.channel.read_specification(0).fingerprint == REQUEST.fingerprint
    assert jobs.requests[name].metadata["flow_run_id"] == "f"
    assert stage.said == [f"submitted {name}"]


def test_stage_with_collected_log_is_resubmitted_to_same_cluster(
    stage: Stage, tmp_path: Path
) -> None:
    """A cluster knows the names of finished jobs for as long as its head lives."""

    def work() -> JobState:
        stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(after(1, work))
    assert stage.follow(jobs).attempt == 0
    for place in ("store/stages", "store/work"):
        shutil.rmtree(tmp_path / place)
    stage = Stage(tmp_path, stage.clock)
    assert stage.follow(jobs).attempt == 0
    assert len(jobs.requests) == 2


def test_fault_row_27_history_is_not_told_again_when_attaching(stage: Stage) -> None:
    stage.hold()
    with stage.journal() as journal:
        journal.metrics(7, {"train/loss": 0.5})

    def work() -> JobState:
        with stage.journal() as journal:
            journal.metrics(8, {"train/loss": 0.4})
        stage.commit()
        return JobState.SUCCEEDED

    stage.follow(Jobs(after(2, work)))
    assert [record.step for record in stage.records] == [8]
    assert stage.said[0] == "earlier attempts reached step 7"
    assert stage.said[1] == "attached to another-a0"


def test_continued_stage_is_followed_under_previous_job_name(
    stage: Stage,
) -> None:
    stage.hold(ray_job="sft-a0")
    asked: list[str] = []

    class Named(Jobs):
        def look(self, submission_id: str) -> JobStatus | None:
            asked.append(submission_id)
            return super().look(submission_id)

    def interrupt() -> JobState:
        raise KeyboardInterrupt

    jobs = Named(after(2, interrupt))
    with pytest.raises(KeyboardInterrupt):
        stage.follow(jobs)
    assert (set(asked), jobs.stopped, jobs.requests) == ({"sft-a0"}, ["sft-a0"], {})
    stage.storage.attempts.join(REQUEST.fingerprint, "cancelled")
    jobs = Named(lambda: JobState.RUNNING)
    stop_followed(stage.storage, jobs, "cancelled")  # type: ignore[arg-type]
    assert jobs.stopped == ["sft-a0"]


@pytest.mark.parametrize(
    "error", [StoreUnreachableError("no answer"), ArtifactCorruptError("00001.json: not JSON")]
)
def test_unreadable_stage_does_not_block_cancelling_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stage.hold(ray_job="sft-a0")
    attempts, unread = stage.storage.attempts, "0" * len(REQUEST.fingerprint)
    for fingerprint in (unread, REQUEST.fingerprint):
        attempts.join(fingerprint, "cancelled")
    entries = attempts.entries

    def failing(fingerprint: str) -> Any:
        if fingerprint == unread:
            raise error
        return entries(fingerprint)

    monkeypatch.setattr(attempts, "entries", failing)
    jobs = Jobs(lambda: JobState.RUNNING)
    stop_followed(stage.storage, jobs, "cancelled")  # type: ignore[arg-type]
    assert jobs.stopped == ["sft-a0"]


def test_a_terminal_that_fails_is_no_failure_of_the_store(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(page: RunPage, record: JournalRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def work() -> JobState:
        with stage.journal() as journal:
            journal.progress(1, 1, "step 1/1")
        stage.commit()
        return JobState.SUCCEEDED

    monkeypatch.setattr(RunPage, "show", full)
    with pytest.raises(OSError, match="No space left"):
        stage.follow(Jobs(after(1, work)))
    assert not [each for each in caplog.records if each.name == waiting.__name__]


@pytest.mark.parametrize("committed", [False, True])
def test_what_our_job_went_on_with_is_told_from_its_beginning(
    stage: Stage, committed: bool
) -> None:
    stage.hold(ray_job="sft-a0")
    with stage.journal() as journal:
        journal.metrics(7, {"val-core/accuracy": 0.5})
    if committed:
        stage.commit()

    def work() -> JobState:
        stage.commit()
        return JobState.SUCCEEDED

    stage.follow(Jobs(after(1, work)), ours=True)
    assert [record.step for record in stage.records] == [7]


@pytest.mark.parametrize(
    ("ours", "exit_code", "told"),
    [
        (True, 1, "sft-a0: ValueError"),
        (True, 143, "-a1-.* was killed"),  # somebody else was cancelled
        (False, 1, "-a1-.* was killed"),
    ],
)
def test_failure_before_following_is_reported_if_job_was_ours(
    stage: Stage, ours: bool, exit_code: int, told: str
) -> None:
    stage.hold(ray_job="sft-a0")
    stage.fail("ValueError", "no such thing", exit_code)
    jobs = Jobs(lambda: JobState.FAILED)
    with pytest.raises(JobFailedError, match=told):
        stage.follow(jobs, ours=ours)
    assert ["-a1-" in name for name in jobs.requests] == [True] * told.startswith("-a1")


def test_what_our_job_claimed_and_never_began_is_submitted(stage: Stage) -> None:
    stage.hold(ray_job="sft-a0")

    def end() -> JobState:
        if jobs.requests:
            stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(after(2, end))
    assert stage.follow(jobs, ours=True).attempt == 1
    assert ["-a1-" in name for name in jobs.requests] == [True]


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


def test_a_job_without_memory_is_told_with_what_needs_less(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure(config: StageConfig, phase: str) -> str:
        monkeypatch.setattr(following, "memory_knobs", lambda _, phase: memory_knobs(config, phase))
        problem = JobProblem(type="X", message="m", exit_code=1, cause="out_of_memory", phase=phase)

        def crash() -> JobState:
            held = stage.storage.attempts.entries(REQUEST.fingerprint)[-1]
            stage.channel.write_error(held.number, problem)
            return JobState.FAILED

        with pytest.raises(JobFailedError) as caught:
            stage.follow(Jobs(after(1, crash)))
        return str(caught.value)

    recipe = load_recipe("quickstart")
    training = recipe.training.on(accelerator=False)
    recipe = recipe.model_copy(update={"training": training})
    assert "X: m; no setting saves memory" in failure(REQUEST.config, "publish")
    said = failure(RLRoundStageConfig.from_recipe(recipe, 1), "gen")
    assert "X: m; to save memory: rollout.max_num_sequences: 512 instead of 1024, rollout." in said
    said = failure(SFTStageConfig.from_recipe(recipe), "train")
    assert "to save memory: training.max_tokens_per_micro_batch: 1024 instead of 2048" in said


@pytest.mark.parametrize("code", [137, -9])
def test_fault_row_24_kill_is_reported_and_retry_has_new_number(stage: Stage, code: int) -> None:
    """As the kernel kills for want of memory; -9 is how Ray tells it."""
    said = rf"was killed .exit code {code}; out of memory\?.*\n    the last line"
    first = Jobs(lambda: JobState.FAILED, code)
    with pytest.raises(JobFailedError, match=said):
        stage.follow(first)
    assert len(first.requests) == 1, "it is not tried again by itself"
    jobs = Jobs(lambda: JobState.FAILED)
    with pytest.raises(JobFailedError):
        stage.follow(jobs)
    assert ["-a1-" in name for name in jobs.requests] == [True]


def test_ray_says_it_failed_but_the_commit_is_there(stage: Stage) -> None:
    def commit_and_fail() -> JobState:
        stage.commit()
        return JobState.FAILED

    assert stage.follow(Jobs(after(1, commit_and_fail))).stage == "promote"


def test_a_lost_head_is_no_verdict_while_the_job_beats(stage: Stage) -> None:
    calls = iter(range(20))

    def status() -> JobState:
        if next(calls, None) is None:
            stage.commit()
            return JobState.SUCCEEDED
        raise JobSubmitError("Ray does not answer")

    with stage.heartbeat():
        assert stage.follow(Jobs(status)).stage == "promote"


def test_late_starter_checks_the_store_before_a_new_attempt(stage: Stage) -> None:
    stage.hold()
    stage.commit()
    jobs = Jobs(lambda: None)
    assert stage.follow(jobs).attempt == 0
    assert jobs.requests == {}


def test_a_forced_generation_is_made_once_per_token(stage: Stage) -> None:
    stage.hold()
    stage.commit("first")

    def work() -> JobState:
        stage.commit("again")
        return JobState.SUCCEEDED

    forced = stage.follow(Jobs(after(1, work)), force="token")
    assert forced.attempt == 2
    assert stage.follow(Jobs(lambda: None)) == forced
    assert stage.follow(Jobs(lambda: None), force="token") == forced


def test_who_is_overtaken_follows_the_other_attempt(stage: Stage) -> None:
    def overtake() -> JobState:
        log = stage.storage.attempts.entries(REQUEST.fingerprint)
        if len(log) == 1:
            stage.hold(1)
        elif len(log) == 2:
            stage.commit()
        return JobState.RUNNING

    with stage.heartbeat(0), stage.heartbeat(1):
        assert stage.follow(Jobs(after(1, overtake))).attempt == 1


@pytest.mark.parametrize("skew_s", [120.0, -120.0])
def test_fault_row_25_a_clock_that_is_off_stops_no_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    monkeypatch.setattr(following, "HEARTBEAT_STALE_S", 1.0)
    monkeypatch.setattr(following, "START_GRACE_S", 1.0)
    stage.hold()
    beats = stage.channel.local_dir(0) / "heartbeat"
    ends_at = stage.clock.monotonic() + 2.0

    def work() -> JobState:
        os.utime(beats, (time.time() - skew_s,) * 2)  # as its host's clock wrote it
        if stage.clock.monotonic() < ends_at:
            return JobState.RUNNING
        stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(work)
    with stage.heartbeat():
        stage.follow(jobs)
    assert (jobs.stopped, jobs.requests) == ([], {})


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


def test_the_last_follower_that_is_cancelled_stops_the_job(stage: Stage) -> None:
    attempts = stage.storage.attempts
    attempts.join(REQUEST.fingerprint, "another")

    def interrupt() -> JobState:
        raise KeyboardInterrupt

    jobs = Jobs(after(1, interrupt))
    with stage.heartbeat():
        with pytest.raises(KeyboardInterrupt):
            stage.follow(jobs)
        assert jobs.stopped == []
        assert attempts.leave(REQUEST.fingerprint, "another") == 0
        with pytest.raises(KeyboardInterrupt):
            stage.follow(jobs)
    assert len(jobs.stopped) == 1


def test_a_follower_that_died_does_not_keep_a_job_alive(stage: Stage) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.store.storage import LocalStorage\n"
        "LocalStorage(Path(sys.argv[1])).attempts.join(sys.argv[2], 'dead')"
    )
    argv = [sys.executable, "-c", code, stage.storage.uri, REQUEST.fingerprint]
    subprocess.run(argv, check=True, env=env.child_environment())
    attempts = stage.storage.attempts
    assert attempts.followed_by("dead") == [REQUEST.fingerprint]
    attempts.join(REQUEST.fingerprint, "me")
    assert attempts.leave(REQUEST.fingerprint, "me") == 0
    assert attempts.followed_by("dead") == []
