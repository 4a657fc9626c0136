"""Submits one stage as a Ray job, and stops the jobs of a cancelled flow run.

Promises: only the holder of an attempt in the stage's log submits it. A failed submission is
recorded in the stage's channel, so that no follower waits for its job.
"""

import logging
import sys
import uuid
from collections.abc import Mapping

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from engines.config.stages.base import Runtime
from infra import env
from infra.errors import ArtifactError, JobSubmitError, on_failure
from infra.ray.api import JobRequest
from infra.ray.jobs import RayJobs
from infra.redact import redact
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Holder
from infra.store.stage_spec import NextStage, StageSpec
from infra.store.storage import Storage
from infra.store.work_channel import JobProblem
from tasks.runner.earlier_work import HalfTrained, copy_adopted_steps, link_adopted
from tasks.runner.run import STAGE_SCHEMA_VERSION, StageRequest

FINGERPRINT_DIGITS = 16
HOLDER_DIGITS = 8
FORWARDED = (
    env.AWS_ENDPOINT_URL,
    env.AWS_ENDPOINT_URL_S3,
    env.AWS_PROFILE,
    env.AWS_REGION,
    env.RLHF_CACHE_BYTES,
    env.RLHF_DEBUG,
    env.RLHF_ENGINE_DEVICE,
    env.RLHF_ENGINE_VENDOR,
    env.RLHF_FAULTS,
    env.RLHF_USE_EXTERNAL_MODULES,
    env.HF_DATASETS_CACHE,
    env.HF_DATASETS_OFFLINE,
    env.HF_ENDPOINT,
    env.HF_HOME,
    env.HF_HUB_OFFLINE,
)
"""Environment variables that a job gets from the process that submits it, besides RLHF_HOME."""


class Submission:
    """Submits attempts of a stage.

    Args:
        metadata: attached to the Ray job.
        adopts: work that the next log entry adopts, unless another process writes that entry.
    """

    def __init__(
        self,
        *,
        request: StageRequest,
        storage: Storage,
        runtime: Runtime,
        metadata: Mapping[str, str],
        follower: str,
        run_key: str,
        adopts: HalfTrained | None = None,
    ) -> None:
        self.request = request
        self.storage = storage
        self.store_uri = storage.uri
        self.channel = storage.channel(request.fingerprint)
        self.follower = follower
        self._runtime = runtime
        self._metadata = metadata
        self._adopts = adopts
        self._adopts_at = len(storage.attempts.entries(request.fingerprint)) if adopts else None
        self._run_key = run_key

    def submit(self, jobs: RayJobs, attempt: int, force: str) -> None:
        """Claim an attempt, and submit its job.

        Args:
            attempt: length of the stage's log as the caller saw it.

        Raises:
            FencedError: another process claimed the attempt.
            JobSubmitError: Ray refused the job or is unreachable; the attempt has failed.
            ArtifactError: the work to adopt does not verify.
        """
        request, storage, holder_id = self.request, self.storage, uuid.uuid4().hex
        config, fingerprint = request.config, request.fingerprint
        # The holder makes the name unique: attempt numbers restart after garbage collection of a
        # log, while the cluster keeps the names of finished jobs.
        place = f"{fingerprint[:FINGERPRINT_DIGITS]}-{storage.name}"
        name = f"{config.stage}-{place}-a{attempt}-{holder_id[:HOLDER_DIGITS]}"
        holder = Holder(id=holder_id, process=own_stamp(), ray_job=name, cluster=jobs.cluster_id)
        adopted = None
        if self._adopts is not None and attempt == self._adopts_at:
            adopted = link_adopted(self._adopts, storage, fingerprint, attempt)
        storage.attempts.hold(fingerprint, holder, attempt, force, adopted)

        def record(error: BaseException) -> None:
            problem = JobProblem(
                type=type(error).__name__,
                message=f"was not submitted: {redact(str(error))}",
                exit_code=1,
            )
            self.channel.write_error(attempt, problem)

        with on_failure(record):
            first = storage.attempts.generation(fingerprint, attempt)[0]
            if adopted := first.adopted:
                copy_adopted_steps(storage, request, adopted, attempt, attempt == first.number)
            spec = self._specification(request, attempt, holder_id)
            self.channel.write_specification(spec.model_copy(update={"adopted": adopted}))
            job = JobRequest(
                argv=[str(request.interpreter or sys.executable), *spec.job_argv],
                env=forwarded_environment(),
                metadata={**self._metadata, "stage": request.label, "fingerprint": fingerprint},
                resources=config.driver_resources,
            )
            if not jobs.submit(name, job):
                raise JobSubmitError(f"a job {name} already exists")

    def _specification(self, request: StageRequest, attempt: int, holder: str) -> StageSpec:
        after = request.then
        if after is not None and after.config.driver_resources != request.config.driver_resources:
            after = None  # it has to wait for its resources without holding others
        return StageSpec(
            schema_version=STAGE_SCHEMA_VERSION,
            stage=request.config.stage,
            job_module=request.config.job_module,
            fingerprint=request.fingerprint,
            attempt=attempt,
            holder=holder,
            config=request.config.model_dump(mode="json"),
            inputs=dict(request.inputs),
            seed=request.seed,
            sources=request.sources,
            libraries=request.libraries,
            rollout_libraries=request.rollout_libraries,
            store_uri=self.store_uri,
            runtime=self._runtime.model_dump(mode="json"),
            then=None
            if after is None or after.interpreter != request.interpreter
            else NextStage(
                spec=self._specification(after, 0, uuid.uuid4().hex),
                identity=after.identity,
                follower=self.follower,
                run_key=self._run_key,
            ),
        )


def forwarded_environment() -> dict[str, str]:
    """Return variables of this process that a job needs but the cluster may not have.

    The home is absolute: ranks and replicas run in directories of their own. Secrets are left out,
    because every client that can list jobs can read a job's environment.
    """
    values = {variable.name: variable.get() for variable in FORWARDED}
    values[env.RLHF_HOME.name] = str(env.home())
    return {name: value for name, value in values.items() if value is not None}


STOP_DEADLINE_S = 20.0

_log = logging.getLogger(__name__)


def run_is_cancelled() -> bool:
    """Return True if a SIGTERM means that the flow run was cancelled.

    A worker that shuts down sends the same signal; only the flow run's state on the server tells
    the two apart. If it is unknown, the result is False, because a running job can still be stopped
    later.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except Exception as failure:  # noqa: BLE001  the process is ending
        _log.warning("the state of the flow run is unknown: %s", failure)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def stop_followed(storage: Storage, jobs: RayJobs, follower: str) -> None:
    """Stop the jobs that a cancelled run followed, unless they have other followers.

    Raises:
        JobError, DeadlineError: Ray cannot be reached, or a job did not end in time.
    """
    for fingerprint in storage.attempts.followed_by(follower):
        try:
            log = storage.attempts.entries(fingerprint)
            has_others = storage.attempts.leave(fingerprint, follower)
        except (ArtifactError, OSError) as error:
            # An unreadable log must not keep other jobs alive.
            _log.warning("%s is not stopped: %s", fingerprint, error)
            continue
        if log and log[-1].kind == "held" and not has_others:
            name = log[-1].holder.ray_job
            status = jobs.look(name)
            if status is not None and not status.is_terminal:
                jobs.stop(name, STOP_DEADLINE_S)
