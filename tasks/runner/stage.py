"""Brings a stage to its result: fingerprint, reuse, attach or submit, follow, verify, record.

Promises: a committed fingerprint is not computed again unless forced. Two runs that need one stage
at the same time share one Ray job. A run that dies leaves its job running, and the next run
attaches to it; the last follower, if cancelled, stops it. A job's ConfigError is raised unchanged.
Does not promise: a retry of a failed job. The next run resumes from its newest step checkpoint.
"""

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from engines.config.stages.base import Runtime
from infra.errors import on_failure
from infra.ray.jobs import RayJobs
from infra.store.stage_log import LogEntry, current_generation
from infra.store.stage_spec import CommitRecord
from infra.store.storage import Storage
from infra.tracking.journal import JournalRecord, StageHistory
from tasks.runner.earlier_work import find_adoptable
from tasks.runner.following import JobFollower
from tasks.runner.recorder import Recorder, RunPage, end_status
from tasks.runner.run import StageRequest, StageResult
from tasks.runner.submission import Submission, stop_followed


class StageObserver:
    """Base of observers of running stages, e.g. a terminal; its methods do nothing."""

    def stage_started(self, label: str, fingerprint: str) -> None:
        """Handle the start of a stage, before it is known if it will be reused or run."""

    def message(self, label: str, text: str) -> None:
        """Handle an event of a stage's job."""

    def record(self, label: str, record: JournalRecord) -> None:
        """Handle a new journal record of a running stage."""

    def stage_finished(self, result: StageResult) -> None:
        """Handle the result of a stage."""


class StageContext:
    """Runs the stages of one pipeline run; a `tasks.runner.run.StageRunner`.

    Args:
        ray_jobs: returns the job client, and starts a cluster; called only if a stage has to run.
        orchestrated: True if each stage is a Prefect task run.
        force: token by stage label; of such a stage only a commit made under the token is reused.
        adopt: labels of stages that continue half-trained work of another fingerprint.
        metadata: attached to each Ray job (`flow_run_id`).
    """

    def __init__(
        self,
        *,
        storage: Storage,
        ray_jobs: Callable[[], RayJobs],
        recorder: Recorder,
        observer: StageObserver,
        runtime: Runtime,
        orchestrated: bool,
        seed: int,
        force: Mapping[str, str],
        adopt: Collection[str],
        metadata: Mapping[str, str],
    ) -> None:
        self._storage = storage
        self._ray_jobs = ray_jobs
        self._recorder = recorder
        self._observer = observer
        self._runtime = runtime
        self._orchestrated = orchestrated
        self.seed = seed
        self._force, self._adopt = force, adopt
        self._metadata = metadata
        self._follower = metadata.get("flow_run_id") or uuid.uuid4().hex
        self.followed: set[str] = set()
        """Names of jobs that this run waited for, except those that continue for another run."""
        self.results: list[StageResult] = []

    def run(self, request: StageRequest) -> StageResult:
        """Bring one stage to its result, in a Prefect task run if the run is orchestrated.

        Raises:
            ConfigError: the job refused its configuration or its input, or nothing can be adopted.
            JobError: Ray refused the job, or the job ended without a commit.
            ArtifactError, OSError: the committed output does not verify, or the store failed.
        """
        if not self._orchestrated:
            return self._bring(request)

        # The store decides what is reused, on any host and under any Prefect server, so Prefect's
        # cache is off. Results are JSON, never pickled.
        @task(
            name=request.config.stage,
            task_run_name=request.label,
            tags=[f"stage:{request.config.stage}"],
            cache_policy=NO_CACHE,
            persist_result=True,
            result_serializer="json",
        )
        def stage() -> Any:
            result = self._bring(request)
            if not result.reused:
                return result
            message = f"{result.label} {result.fingerprint[:12]} was already committed"
            return Completed(name="Reused", message=message, data=result)

        outcome: Any = stage()
        return cast(StageResult, outcome.result() if isinstance(outcome, State) else outcome)

    def stop_jobs(self) -> None:
        """Stop jobs that only this run follows, including next stages that they already began.

        Raises:
            JobError, DeadlineError: Ray cannot be reached, or a job did not end in time.
        """
        if self.followed:
            stop_followed(self._storage, self._ray_jobs(), self._follower)

    def _bring(self, request: StageRequest) -> StageResult:
        started = time.monotonic()
        force = self._force.get(request.label, "")
        self._observer.stage_started(request.label, request.fingerprint)
        # Before the lookup, so that `rlhf gc` does not remove it in between.
        self._storage.runs.use(self._recorder.run_key, request.fingerprint)
        log = self._storage.attempts.entries(request.fingerprint)
        # A job that this run followed may have continued with this stage, even to its commit.
        ours = bool(log) and log[-1].holder.ray_job in self.followed
        record = self._storage.lookup(request.fingerprint, force)
        of = current_generation(log if record is None else log[: record.attempt + 1])
        reused = record is not None and not ours
        if record is None or ours:
            record = self._compute(request, force, of, ours)
        else:
            self._storage.verify(record.artifact, "size")
            self._recorder.stage_reused(request, record, of)
        result = StageResult(
            label=request.label,
            fingerprint=request.fingerprint,
            artifact=record.artifact,
            reused=reused,
            wall_s=time.monotonic() - started,
            adopted=record.adopted,
            metrics=record.metrics,
            job_seconds=record.seconds,
        )
        self.results.append(result)
        self._observer.stage_finished(result)
        return result

    def _compute(self, request: StageRequest, force: str, of: int, ours: bool) -> CommitRecord:
        if request.then is not None and request.then.label in self._force:
            request = replace(request, then=None)  # the job does not know its token
        asked = request.label in self._adopt
        submission = Submission(
            request=request,
            storage=self._storage,
            runtime=self._runtime,
            metadata=self._metadata,
            follower=self._follower,
            run_key=self._recorder.run_key,
            adopts=find_adoptable(self._storage, request) if asked else None,
        )

        def on_stand(log: Sequence[LogEntry]) -> None:
            nonlocal of
            of = current_generation(log)
            self._recorder.stage_started(request, of, log[of].adopted)
            if asked and log[of].adopted is None:
                self._observer.message(request.label, "its own work goes on; nothing was adopted")

        def on_record(record: JournalRecord) -> None:
            self._observer.record(request.label, record)
            self._recorder.stage_grew(request, of)

        page = RunPage(request.label)
        follower = JobFollower(
            submission,
            force=force,
            page=page,
            say=lambda text: self._observer.message(request.label, text),
            on_stand=on_stand,
            ours=ours,
        )

        def record_failure(error: BaseException) -> None:
            if follower.ray_job and not follower.others_wait:
                self.followed.add(follower.ray_job)
            committed = StageHistory(self._storage).commit(request.fingerprint, of)
            if committed is None:
                self._recorder.stage_ended(request, end_status(error), of)
            else:
                self._recorder.stage_finished(request, committed, of)
            error.add_note(request.label)

        with on_failure(record_failure):
            record = follower.follow(self._ray_jobs(), on_record)
        log = self._storage.attempts.entries(request.fingerprint)[: record.attempt + 1]
        self.followed.add(log[-1].holder.ray_job)
        self._recorder.stage_finished(request, record, current_generation(log))
        page.close()
        return record
