"""One stage as a Ray job: where its attempts live, and how one is submitted or found.

Promises: at most one attempt of a fingerprint runs at a time, whoever asks for it; an attempt
whose heartbeat has stopped, or that left an error, does not count as running.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from engines.config.stages import Runtime
from infra import env
from infra.ray.job_types import JobRequest
from infra.store.atomic import atomic_write_bytes
from infra.store.canonical import canonical_json
from infra.store.heartbeat import heartbeat_age_s
from infra.store.stage_spec import StageSpec
from tasks.runner.identity import STAGE_SCHEMA_VERSION, StageRequest

HEARTBEAT_STALE_S = 60.0
"""Silence after which a job counts as dead; a job beats every `Runtime.heartbeat_s` seconds."""
START_GRACE_S = 300.0
"""A job that was submitted this long ago and never beat counts as dead."""
FINGERPRINT_DIGITS = 16


class Submission:
    """A stage's attempts.

    Args:
        request: the stage.
        work_dir: `work/<fingerprint>`.
        store_uri: where the job publishes.
        runtime: what the job needs but does not change its output.
        metadata: travels with the Ray job.
    """

    def __init__(
        self,
        *,
        request: StageRequest,
        work_dir: Path,
        store_uri: str,
        runtime: Runtime,
        metadata: Mapping[str, str],
    ) -> None:
        self._request = request
        self._work_dir = work_dir
        self._store_uri = store_uri
        self._runtime = runtime
        self._metadata = {**metadata, "stage": request.label, "fingerprint": request.fingerprint}

    @property
    def key(self) -> str:
        """Names the work for Ray: equal stages collide on purpose."""
        return f"{self._request.stage}-{self._request.fingerprint[:FINGERPRINT_DIGITS]}"

    @property
    def journal_path(self) -> Path:
        """The stage's journal, shared by all attempts."""
        return self._work_dir / "journal.jsonl"

    def attempt_dir(self, attempt: int) -> Path:
        """The attempt's own directory."""
        return self._work_dir / f"attempt-{attempt}"

    def build_attempt(self, attempt: int) -> JobRequest:
        """Write the attempt's specification, and say how it is run."""
        spec = StageSpec(
            schema_version=STAGE_SCHEMA_VERSION,
            stage=self._request.stage,
            job_module=self._request.job_module,
            fingerprint=self._request.fingerprint,
            attempt=attempt,
            config=self._request.config.model_dump(mode="json"),
            inputs=dict(self._request.inputs),
            seed=self._request.seed,
            sources=self._request.sources,
            libraries=self._request.libraries,
            store_uri=self._store_uri,
            work_dir=self._work_dir,
            runtime=self._runtime.model_dump(mode="json"),
        )
        path = self.attempt_dir(attempt) / "spec.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, canonical_json(spec))
        python = str(self._request.interpreter or sys.executable)
        return JobRequest(
            argv=[python, "-P", "-m", self._request.job_module, str(path)],
            env=forwarded_environment(),
            metadata=self._metadata,
        )

    def first_attempt(self) -> int:
        """The first number that may still run, or was never used.

        The job server forgets its jobs with its head; the attempts' directories remember.
        """
        attempt = 0
        while self.attempt_dir(attempt).exists() and not self.is_alive(attempt):
            attempt += 1
        return attempt

    def is_alive(self, attempt: int) -> bool:
        """Whether an attempt that Ray calls running shows signs of life.

        Ray keeps calling a job running after a crash of its head; the job's own heartbeat does
        not.
        """
        if (self.attempt_dir(attempt) / "error.json").exists():
            return False
        return self.silence_s(attempt) < HEARTBEAT_STALE_S

    def silence_s(self, attempt: int) -> float:
        """Seconds since the attempt's last sign of life, beyond the grace that a start gets."""
        age_s = heartbeat_age_s(self.attempt_dir(attempt) / "heartbeat.json")
        if age_s is not None:
            return age_s
        try:
            submitted_at = (self.attempt_dir(attempt) / "spec.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0
        return max(0.0, time.time() - submitted_at - START_GRACE_S)


def forwarded_environment() -> dict[str, str]:
    """Variables of this process that a job needs although the cluster was started without them.

    Secrets are not among them: whoever may list jobs can read a job's environment.
    """
    forwarded = (
        env.RLHF_DEBUG,
        env.RLHF_ENGINE_DEVICE,
        env.RLHF_ENGINE_VENDOR,
        env.RLHF_FAULTS,
        env.RLHF_PLATFORM,
        env.RLHF_STAGE_THREADS,
        env.RLHF_USE_EXTERNAL_MODULES,
        env.HF_HOME,
        env.HF_HUB_OFFLINE,
    )
    values = {variable.name: variable.get() for variable in forwarded}
    return {name: value for name, value in values.items() if value is not None}
