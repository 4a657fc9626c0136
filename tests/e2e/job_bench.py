"""Jobs as they are run: processes with a specification file, without Ray and Prefect."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import env
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage
from infra.tracking.journal import JournalRecord, read_journal
from infra.waiting import wait_for

JOB_DEADLINE_S = 240.0
HOLDER = Holder(id="test", process="test", ray_job="sft-a0")


@dataclass(frozen=True)
class Bench:
    """A store and a work directory of their own."""

    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def spec(
        self,
        stage: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        attempt: int = 0,
    ) -> StageSpec:
        """A specification whose fingerprint depends on stage, configuration and inputs."""
        identity = [stage, config, {name: artifact.digest for name, artifact in inputs.items()}]
        fingerprint = digest_of(json.dumps(identity, sort_keys=True))
        return StageSpec(
            stage=stage,
            job_module=f"engines.jobs.{stage}",
            fingerprint=fingerprint,
            attempt=attempt,
            holder=HOLDER.id,
            config=dict(config),
            inputs=dict(inputs),
            seed=3,
            store_uri=str(self.root / "store"),
        )

    def start(self, spec: StageSpec) -> "subprocess.Popen[str]":
        """The job's process."""
        store = open_storage(spec.store_uri)
        store.attempts.hold(spec.fingerprint, HOLDER, spec.attempt)
        store.channel(spec.fingerprint).write_specification(spec)
        return subprocess.Popen(
            [sys.executable, *spec.job_argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env.child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", **self.environment),
        )

    def run(self, spec: StageSpec) -> CommitRecord:
        """Run a job to its end."""
        process = self.start(spec)
        output, _ = process.communicate(timeout=JOB_DEADLINE_S)
        assert process.returncode == 0, output
        record = open_storage(spec.store_uri).lookup(spec.fingerprint)
        assert record is not None
        return record

    def kill_after_step(self, spec: StageSpec, step: int) -> None:
        """Start a job and SIGKILL it once it has recorded a step."""
        process = self.start(spec)
        try:
            wait_for(
                lambda: process.poll() is not None or steps_done(spec) >= step,
                f"step {step} of {spec.stage}",
                JOB_DEADLINE_S,
                poll_s=0.002,
            )
        finally:
            process.kill()
            output, _ = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL, output


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def journal_of(spec: StageSpec) -> list[JournalRecord]:
    return read_journal(open_storage(spec.store_uri), spec.fingerprint)[0]


def steps_done(spec: StageSpec) -> int:
    records = journal_of(spec)
    return max((record.done or 0 for record in records if record.kind == "progress"), default=0)


def metrics_of(spec: StageSpec) -> list[JournalRecord]:
    return [record for record in journal_of(spec) if record.kind == "metrics"]
