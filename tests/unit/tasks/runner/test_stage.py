"""A run's stages: what it asks of a job, and which jobs its end stops."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rlhf.testing.json_lines_tracker import JsonLinesTracker

from engines.config.sections import PromoteConfig
from engines.config.stages.base import Runtime
from engines.config.stages.final import PromoteStageConfig
from infra.ray.api import JobRequest, JobState, JobStatus
from infra.store.stage_log import Attempt, Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import LocalStorage
from infra.tracking.journal import StageHistory
from infra.tracking.ledger import Ledger
from infra.tracking.shipper import Shipper
from infra.tracking.tracker import TrackerSettings
from tasks.runner.recorder import Recorder
from tasks.runner.run import StageRequest, stage_request
from tasks.runner.stage import StageContext, StageObserver


class Later(PromoteStageConfig):
    """A stage that the first one's job may go on with."""

    stage = "later"

    @property
    def job_module(self) -> str:
        return "engines.jobs.promote"


class Jobs:
    """A job server whose jobs commit at once, and claim the stage that follows."""

    cluster_id = ""

    def __init__(self, storage: LocalStorage, scratch: Path) -> None:
        self.storage, self.scratch = storage, scratch
        self.specs: list[StageSpec] = []
        self.stopped: list[str] = []
        self.claims: Callable[[str], None] = lambda ray_job: None

    def submit(self, submission_id: str, request: JobRequest) -> bool:
        fingerprint, attempt = request.argv[-2], int(request.argv[-1])
        spec = self.storage.channel(fingerprint).read_specification(attempt)
        self.specs.append(spec)
        self.scratch.mkdir()
        (self.scratch / "decision.json").write_text("{}")
        self.claims(submission_id)
        self.storage.commit(
            Attempt(fingerprint, attempt, spec.holder),
            CommitRecord(
                fingerprint=fingerprint,
                stage=spec.stage,
                artifact=self.storage.publish(self.scratch, "evaluation"),
                attempt=attempt,
                committed_at="2026-01-01T00:00:00+00:00",
            ),
        )
        return True

    def look(self, submission_id: str) -> JobStatus:
        return JobStatus(submission_id, JobState.RUNNING, "", None, {})

    def stop(self, submission_id: str, deadline_s: float) -> None:
        self.stopped.append(submission_id)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(LocalStorage(tmp_path / "store"), tmp_path / "scratch")


def new_context(jobs: Jobs, home: Path, **force: str) -> StageContext:
    tracker = JsonLinesTracker(TrackerSettings(home))
    shipper = Shipper(Ledger(home, tracker.address, "s"), tracker, StageHistory(jobs.storage))
    recorder = Recorder(shipper, identity={}, name="tiny", params={}, tags={}, store_uri="s")
    return StageContext(
        storage=jobs.storage,
        ray_jobs=lambda: jobs,  # type: ignore[arg-type,return-value]
        recorder=recorder,
        observer=StageObserver(),
        runtime=Runtime(),
        orchestrated=False,
        seed=0,
        force=force,
        adopt=(),
        metadata={"flow_run_id": "run"},
    )


def requests() -> tuple[StageRequest, StageRequest]:
    """A stage whose job may go on with another, and that one."""
    model = Artifact(kind="model", uri="/x", digest="d" * 64)
    later = stage_request(Later(promote=PromoteConfig()), 0, model=model)
    return stage_request(PromoteStageConfig(promote=PromoteConfig()), 0, later), later


@pytest.mark.parametrize("forced", [False, True])
def test_a_forced_stage_is_not_begun_by_the_job_before_it(
    jobs: Jobs, tmp_path: Path, forced: bool
) -> None:
    context = new_context(jobs, tmp_path, **({"later": "token"} if forced else {}))
    context.run(requests()[0])
    assert (jobs.specs[0].then is None) == forced
    context._recorder.close()


def test_the_end_of_a_run_stops_what_its_job_began_for_it(jobs: Jobs, tmp_path: Path) -> None:
    context = new_context(jobs, tmp_path)
    first, later = requests()

    def claim(ray_job: str) -> None:
        holder = Holder(id="claim", process="elsewhere", ray_job=ray_job)
        jobs.storage.attempts.hold(later.fingerprint, holder, 0)
        jobs.storage.attempts.join(later.fingerprint, "run")

    jobs.claims = claim
    context.stop_jobs()
    assert jobs.stopped == []
    context.run(first)
    context.stop_jobs()
    assert jobs.stopped == [jobs.storage.attempts.entries(later.fingerprint)[0].holder.ray_job]
    context._recorder.close()


@pytest.mark.parametrize("moment", ["before it is told", "after it is told"])
def test_ctrl_c_right_behind_a_commit_finds_the_stage_finished(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is one run of the tracker, and neither killed nor running for ever."""
    start = Recorder.stage_started

    def interrupted(*arguments: object, **named: object) -> None:
        if moment == "after it is told":
            start(*arguments, **named)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "stage_started", interrupted)
    context = new_context(jobs, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        context.run(requests()[0])
    context._recorder.run_ended("KILLED")
    context._recorder.close()
    tracker = JsonLinesTracker(TrackerSettings(tmp_path))
    runs = [tracker.run(line["key"]) for line in tracker._lines() if "key" in line]
    assert sorted((bool(run["parent"]), run["state"]) for run in runs) == [
        (False, "KILLED"),
        (True, "FINISHED"),
    ]
