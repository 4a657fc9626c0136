"""A job that only counts: its steps, journal and checkpoints are those of a training job.

    python stepping_job.py STORE FINGERPRINT ATTEMPT

`TAKEN_AFTER` in the environment names a step: after it another home takes the stage over, while
this job goes on as one that was asleep.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from engines.config.sections import CheckpointConfig
from engines.config.stages.final import PromoteStageConfig
from engines.controller.worker_group import WorkerGroup
from engines.jobs.process.policy_stage import stage_progress
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.trainers.step_timer import PhaseClock
from infra.store.stage_log import Holder

NUM_STEPS = int(os.environ["NUM_STEPS"])
CHECKPOINTS = CheckpointConfig(
    every_num_steps=5, async_save=os.environ.get("SAVES") == "background"
)


class CountingWorkers:
    """A group whose state is the number of the step."""

    world_size = 1

    def run(self, method: Callable[..., Any], path: Path, *step: int) -> None:
        if step:
            (path / "state.txt").write_text(f"after step {step[0]}", encoding="utf-8")
        if method.__name__ == "begin_checkpoint":
            (path / ".written-0").touch()


def count(context: JobContext[PromoteStageConfig]) -> JobOutput:
    """Count up to the last step, from where the newest checkpoint is."""
    progress = stage_progress(context, CHECKPOINTS, NUM_STEPS)
    workers = cast(WorkerGroup, CountingWorkers())
    begun = progress.resume(workers).step
    for step in range(begun + 1, NUM_STEPS + 1):
        progress.record(step, step, {"loss": 1.0 / step, "begun": begun}, PhaseClock())
        progress.checkpoint_when_due(step, workers)
        if str(step) == os.environ.get("TAKEN_AFTER"):
            progress.last_checkpoint()  # is there, whoever writes it
            spec, other = context.spec, Holder(id="other", process="elsewhere", cluster="another")
            context.storage.attempts.hold(spec.fingerprint, other, spec.attempt + 1)
    path = progress.last_checkpoint()
    (context.output_dir / "state.txt").write_bytes((path / "state.txt").read_bytes())
    return JobOutput("counted", {})


if __name__ == "__main__":
    run_job(PromoteStageConfig, count)
