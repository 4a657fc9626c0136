"""Record a training loop's steps, and keep the checkpoints that its next attempt resumes from.

Promises: every step has metrics in the journal, once. They are recorded before the step's
checkpoint, and a checkpoint is not loaded if its steps are missing in the journal.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.checkpoint.background import BackgroundSave
from engines.checkpoint.step_store import StepCheckpoint, StepCheckpoints, TrainerState
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.trainers.step_timer import PhaseClock
from infra.store.heartbeat import Heartbeat
from infra.tracking.journal import Journal

HEADLINES = (
    "train/loss",
    "preference/accuracy",
    "reward_model/accuracy",
    "critic/score/mean",
    "actor/entropy",
    "response_length/mean",
    "mismatch/logprob_abs_max",
    "timing_s/step",
)
"""Metrics of the one-line summary of a step, if the step has them."""

JOB_PHASES = {"gen": "gen", "reward": "reward"}
"""Phases of a step that the commit record names; all others count as training."""

AVERAGED_DIR = "averaged"
"""Subdirectory of the step checkpoints for the last checkpoint, with averaged weights."""

STEP_DEADLINE_S = 7200.0
"""A step that takes longer is considered hung."""

logger = logging.getLogger(__name__)


class StageProgress:
    """Records the steps of one training stage, and saves and loads its checkpoints.

    Journal and checkpoints span all attempts. A checkpoint is due `every_num_steps` and after the
    last step. With `background_timeout_s` they are written in the background with this deadline.
    """

    def __init__(
        self,
        journal: Journal,
        heartbeat: Heartbeat,
        checkpoints: StepCheckpoints,
        every_num_steps: int,
        num_steps: int,
        clock: PhaseClock,
        background_timeout_s: float | None = None,
    ) -> None:
        self._background_timeout_s = background_timeout_s
        self._in_flight: BackgroundSave | None = None
        self.journal, self._heartbeat = journal, heartbeat
        self._checkpoints, self._every = checkpoints, every_num_steps
        self._num_steps = num_steps
        self._newest: StepCheckpoint | None = None
        self.clock = clock

    def resume(self, workers: WorkerGroup) -> TrainerState:
        """Load the newest valid checkpoint the journal covers; return its state, else step 0."""
        self._heartbeat.enter("train", STEP_DEADLINE_S)
        newest = self._newest = self._checkpoints.latest_valid(self.journal.num_done)
        if newest is None:
            return TrainerState(step=0)
        with self.clock("load"):
            workers.run(ModelWorker.load_checkpoint, newest.path)
        self.journal.log(f"continuing after step {newest.step} of {self._num_steps}")
        return newest.state

    def record(
        self, global_step: int, step: int, metrics: Mapping[str, float], clock: PhaseClock
    ) -> None:
        """Record a finished step; raise the error of a failed background checkpoint.

        `global_step` counts over all rounds, `step` (1-based) in this stage.
        """
        if self._in_flight is not None and self._in_flight.done:
            self._settle()
        for phase, seconds in clock.seconds.items():
            self.clock.add(JOB_PHASES.get(phase, "train"), seconds)
        self._heartbeat.step = step
        self.journal.metrics(global_step, metrics)
        shown = [f"{name} {metrics[name]:.4g}" for name in HEADLINES if name in metrics]
        line = f"step {step}/{self._num_steps}  {'  '.join(shown)}"
        self.journal.progress(step, self._num_steps, line)
        logger.info("%s", line)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of held-out rows after a step; step 0 is before the first one."""
        self._heartbeat.tick()
        if metrics:
            self.journal.metrics(step, metrics)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            self.journal.progress(step, self._num_steps, f"after step {step}: {shown}")

    def checkpoint_when_due(
        self,
        step: int,
        workers: WorkerGroup,
        *,
        values: Mapping[str, float] | None = None,
        last: bool = False,
    ) -> None:
        """Publish a step checkpoint, with the loop's `values`, if it is due or the last."""
        if step % self._every and not last and step != self._num_steps:
            return
        state = TrainerState(step=step, values=values or {})
        with self.clock("save"):
            self._settle()
            if self._background_timeout_s is not None:
                self._in_flight = BackgroundSave(
                    self._checkpoints, step, state, workers.world_size, self._background_timeout_s
                )
                self._in_flight.stage(
                    lambda path: workers.run(ModelWorker.begin_checkpoint, path, step)
                )
                return
            self._newest = self._checkpoints.save(
                step, lambda path: workers.run(ModelWorker.save_checkpoint, path, step), state
            )

    def adopt_average(self, workers: WorkerGroup) -> None:
        """Adopt the weights' average, if any, and save it apart from the resume checkpoint.

        An attempt that is killed here resumes from the unaveraged weights and repeats this.
        """
        with self.clock("save"):
            self._settle()
            if self._newest is None or not workers.run(ModelWorker.adopt_average):
                return
            step = self._newest.step
            self._newest = self._checkpoints.beside(AVERAGED_DIR).save(
                step,
                lambda path: workers.run(ModelWorker.save_checkpoint, path, step),
                self._newest.state,
            )

    def _settle(self) -> None:
        """Wait for the checkpoint in flight, if any; raises its error."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._newest = in_flight.result()

    def last_checkpoint(self) -> Path:
        """Return, after the loop, the directory of the last checkpoint, averaged if configured."""
        with self.clock("save"):
            self._settle()
        if self._newest is None:
            raise RuntimeError("the loop ended without a checkpoint")
        return self._newest.path


@dataclass(frozen=True)
class LoopStep:
    """A 1-based step of a stage; `global_number` also counts the rounds before."""

    number: int
    global_number: int
    clock: PhaseClock = field(default_factory=PhaseClock)
