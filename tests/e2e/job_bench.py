"""Jobs as they are run: processes with a specification file, without Ray and Prefect.

They are forks of a process that has loaded torch and transformers, which takes longer than most of
these jobs.
"""

import hashlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.testing.forked import start_python

from infra import env
from infra.store.stage_log import Holder
from infra.store.stage_spec import Artifact, CommitRecord, StageSpec
from infra.store.storage import open_storage
from infra.tracking.journal import JournalRecord, read_journal
from infra.waiting import wait_for

JOB_DEADLINE_S = 240.0
HOLDER = Holder(id="test", process="test", ray_job="sft-a0")


class Job:
    """The process of a job.

    Args:
        argv: options and arguments of its interpreter.
        environment: beside this process's own.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        # Not the directory of what is run, and nothing of the current one: `-P`.
        arguments = argv[argv.index("-m") :]
        self._output = Path(tempfile.mkstemp(suffix=".log")[1])
        given = env.child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", **environment)
        self._process = start_python(arguments, self._output, given)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, -N by signal N; None while it runs."""
        return self._process.returncode

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it, if it lives."""
        self._process.kill()

    def ended(self, timeout_s: float) -> tuple[int, str]:
        """Wait for its end; its exit code and what it printed."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return code, self._output.read_text(errors="replace")


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

    def start(self, spec: StageSpec) -> "Job":
        """The job's process."""
        store = open_storage(spec.store_uri)
        store.attempts.hold(spec.fingerprint, HOLDER, spec.attempt)
        store.channel(spec.fingerprint).write_specification(spec)
        return Job(spec.job_argv, self.environment)

    def run(self, spec: StageSpec) -> CommitRecord:
        """Run a job to its end."""
        process = self.start(spec)
        code, output = process.ended(JOB_DEADLINE_S)
        assert code == 0, output
        record = open_storage(spec.store_uri).lookup(spec.fingerprint)
        assert record is not None
        return record

    def kill_after_step(self, spec: StageSpec, step: int) -> None:
        """Start a job and SIGKILL it once it has recorded a step."""
        process = self.start(spec)
        try:
            wait_for(
                lambda: process.returncode is not None or steps_done(spec) >= step,
                f"step {step} of {spec.stage}",
                JOB_DEADLINE_S,
                poll_s=0.002,
            )
        finally:
            process.kill()
            code, output = process.ended(30.0)
        assert code == -signal.SIGKILL, output


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def journal_of(spec: StageSpec) -> list[JournalRecord]:
    return read_journal(open_storage(spec.store_uri), spec.fingerprint)[0]


def steps_done(spec: StageSpec) -> int:
    records = journal_of(spec)
    return max((record.done or 0 for record in records if record.kind == "progress"), default=0)


def metrics_of(spec: StageSpec) -> list[JournalRecord]:
    return [record for record in journal_of(spec) if record.kind == "metrics"]
