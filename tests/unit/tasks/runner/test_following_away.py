"""Following a job while somebody is away: one that fell silent, and a store that does not answer.

The job client is a stand-in that injects what a cluster does on a bad day; the journal, the
store, the attempts and the heartbeat are the real ones.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from followed_stage import HOLDER, REQUEST, Jobs, Stage, after

from infra import waiting
from infra.errors import (
    JobFailedError,
    JobSubmitError,
    StoreUnreachableError,
)
from infra.ray.api import JobState
from infra.store.work_channel import JobProblem, LocalChannel
from tasks.runner import following


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "HEARTBEAT_STALE_S", 0.2)
    monkeypatch.setattr(following, "LOST_GRACE_S", 0.2)
    monkeypatch.setattr(following, "STATUS_EVERY_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_silent_job_is_stopped_and_fails(stage: Stage) -> None:
    with stage.heartbeat():
        pass
    jobs = Jobs(lambda: JobState.RUNNING)
    started = stage.clock.monotonic()
    with pytest.raises(JobFailedError, match="gave no sign of life"):
        stage.follow(jobs)
    assert len(jobs.stopped) == 1
    assert 0.2 <= stage.clock.monotonic() - started < 0.5


@pytest.mark.usefixtures("impatient")
def test_a_silent_job_of_another_run_is_taken_over(stage: Stage) -> None:
    stage.hold()
    with stage.heartbeat():
        pass

    def work() -> JobState:
        if len(stage.storage.attempts.entries(REQUEST.fingerprint)) == 2:
            stage.commit()
        return JobState.RUNNING

    jobs = Jobs(work)
    assert stage.follow(jobs).attempt == 1
    assert [name[-3:] for name in jobs.stopped] == ["-a0"]
    assert ["-a1-" in name for name in jobs.requests] == [True]


@pytest.mark.usefixtures("impatient")
def test_a_head_that_dies_before_the_first_beat_is_noticed_soon(stage: Stage) -> None:
    def unreachable() -> JobState:
        raise JobSubmitError("Ray does not answer")

    with pytest.raises(JobFailedError, match="gave no sign of life"):
        stage.follow(Jobs(unreachable))


@pytest.mark.usefixtures("impatient")
def test_a_job_that_another_cluster_has_not_begun_is_left_to_it(stage: Stage) -> None:
    """Two homes with a Ray head each share a store: ours does not know the other's jobs."""
    held = HOLDER.model_copy(update={"ray_job": "another-a0", "cluster": "another"})
    stage.storage.attempts.hold(REQUEST.fingerprint, held, 0)
    begins_at = stage.clock.monotonic() + 1.0

    def work() -> None:
        if stage.clock.monotonic() > begins_at:
            stage.commit()

    jobs = Jobs(work)
    assert stage.follow(jobs).attempt == 0
    assert (jobs.requests, jobs.stopped) == ({}, [])


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_does_not_keep_a_silent_job_alive(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(attempt: int, problem: JobProblem) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with stage.heartbeat():
        pass
    monkeypatch.setattr(LocalChannel, "write_error", lambda self, *args: full(*args))
    jobs = Jobs(lambda: JobState.RUNNING)
    with pytest.raises(OSError, match="No space"):
        stage.follow(jobs)
    assert len(jobs.stopped) == 1


@contextmanager
def away(
    owner: Any, name: str, calls: Callable[[int], bool], error: OSError | None = None
) -> Iterator[list[int]]:
    """A read or write of the store that fails at some of its calls, counted from 1."""
    num_calls = [0]
    real = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        num_calls[0] += 1
        if calls(num_calls[0]):
            raise error or StoreUnreachableError("503 SlowDown")
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield num_calls


@pytest.mark.parametrize("name", ["entries", "join", "read_beat", "read_error", "lookup"])
@pytest.mark.parametrize("error", [None, OSError(errno.ESTALE, "Stale file handle")])
def test_a_store_that_is_away_for_a_moment_ends_no_run(
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: OSError | None,
) -> None:
    monkeypatch.setattr(following, "STATUS_EVERY_S", 0.05)
    monkeypatch.setattr(waiting, "ANSWER_POLL_S", 0.05)
    stage.hold()

    def commit() -> JobState:
        stage.commit()
        return JobState.SUCCEEDED

    owners: list[Any] = [stage.storage, stage.storage.attempts, LocalChannel]
    (owner,) = [each for each in owners if hasattr(each, name)]
    first = 1 if name == "lookup" else 2  # who cannot join at all is told so
    failing = {first, first + 1}
    with stage.heartbeat(), away(owner, name, failing.__contains__, error) as num_calls:
        assert stage.follow(Jobs(after(8, commit))).attempt == 0
    assert num_calls[0] > first + 1
    said = [r for r in caplog.records if (r.name, r.levelname) == (waiting.__name__, "WARNING")]
    assert len(said) == 1


def test_unreachable_store_ends_run_at_deadline_but_leaves_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "STORE_AWAY_S", 0.5)
    stage.hold()
    jobs = Jobs(lambda: JobState.RUNNING)
    began = stage.clock.monotonic()
    with (
        stage.heartbeat(),
        away(stage.storage.attempts, "entries", lambda number: number > 3),
        pytest.raises(StoreUnreachableError),
    ):
        stage.follow(jobs)
    assert 0.5 <= stage.clock.monotonic() - began < 2.0
    assert jobs.stopped == []


@pytest.mark.usefixtures("impatient")
def test_time_in_which_the_store_was_away_is_no_silence(stage: Stage) -> None:
    """The stage's log cannot be read for longer than a job may be silent."""
    stage.hold()
    until = [0.0]

    def is_away(number: int) -> bool:
        if number == 5:
            until[0] = stage.clock.monotonic() + 1.0
        return stage.clock.monotonic() < until[0]

    def commit() -> JobState:
        stage.commit()
        return JobState.SUCCEEDED

    jobs = Jobs(after(5, commit))
    with stage.heartbeat(), away(stage.storage.attempts, "entries", is_away):
        assert stage.follow(jobs).attempt == 0
    assert jobs.stopped == []


@pytest.mark.parametrize("log_too", [False, True])
def test_ctrl_c_stops_the_job_though_the_store_is_away(stage: Stage, log_too: bool) -> None:
    is_away = [False]

    def interrupt() -> JobState:
        is_away[0] = True
        raise KeyboardInterrupt

    jobs = Jobs(after(1, interrupt))
    with (
        away(stage.storage.attempts, "leave", lambda _: True),
        away(stage.storage.attempts, "entries", lambda _: log_too and is_away[0]),
        pytest.raises(KeyboardInterrupt),
    ):
        stage.follow(jobs)
    assert jobs.stopped == list(jobs.requests)


def test_a_follower_that_cannot_leave_has_its_commit(stage: Stage) -> None:
    stage.hold()
    stage.commit()
    with away(stage.storage.attempts, "leave", lambda _: True):
        assert stage.follow(Jobs(lambda: None)).attempt == 0
