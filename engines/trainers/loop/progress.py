"""What a training loop tells the world after a step, and what it keeps for its next attempt.

Promises: the metrics of a step are recorded before its checkpoint is published, and none is loaded
whose steps the journal does not have, so no step is ever without its metrics; the journal keeps
each step once, however often it is repeated.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from engines.checkpoint.background import BackgroundSave
from engines.checkpoint.step_store import StepCheckpoint, StepCheckpoints, TrainerState
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.trainers.loop.phases import PhaseClock
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
"""Metrics of the one line per step, where the step has them."""

JOB_PHASES = {"gen": "gen", "reward": "reward"}
"""Phases of a step that the commit record names; every other one is training."""

AVERAGED_DIR = "averaged"
"""Below the step checkpoints: the last one, with the average of the weights in their place."""

STEP_DEADLINE_S = 7200.0
"""A step that takes so long hangs."""

logger = logging.getLogger(__name__)


class StageProgress:
    """Journal, heartbeat, step checkpoints and clock of one training stage.

    Args:
        journal: metrics and progress, over all attempts.
        heartbeat: of this attempt.
        checkpoints: step checkpoints, over all attempts.
        every_num_steps: how often a checkpoint is due; the last step always is.
        num_steps: of the stage.
        clock: the job's phases.
        background_timeout_s: write checkpoints while training goes on, each within this; None
            waits for every one.
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
        self._journal, self._heartbeat = journal, heartbeat
        self._checkpoints, self._every = checkpoints, every_num_steps
        self._num_steps = num_steps
        self._newest: StepCheckpoint | None = None
        self.clock = clock

    def resume(self, workers: WorkerGroup) -> TrainerState:
        """Load the newest valid step checkpoint, if there is one; returns what it knew.

        One of a step that the journal lacks is another attempt's, whose later metrics do not count.
        """
        self._heartbeat.enter("train", STEP_DEADLINE_S)
        newest = self._newest = self._checkpoints.latest_valid(self._journal.num_done)
        if newest is None:
            return TrainerState(step=0)
        with self.clock("load"):
            workers.run(ModelWorker.load_checkpoint, newest.path)
        self._journal.log(f"continuing after step {newest.step} of {self._num_steps}")
        return newest.state

    def say(self, line: str) -> None:
        """Tell a line to whoever watches the run."""
        self._journal.log(line)

    def record(
        self, global_step: int, step: int, metrics: Mapping[str, float], clock: PhaseClock
    ) -> None:
        """Record a finished step; raises what went wrong with a checkpoint in the background.

        Args:
            global_step: number of the step in the journal, over all rounds.
            step: number of the step in this stage, 1-based.
            metrics: of the step.
            clock: of the step.
        """
        if self._in_flight is not None and self._in_flight.done:
            self._settle()
        for phase, seconds in clock.seconds.items():
            self.clock.add(JOB_PHASES.get(phase, "train"), seconds)
        self._heartbeat.step = step
        self._journal.metrics(global_step, metrics)
        shown = [f"{name} {metrics[name]:.4g}" for name in HEADLINES if name in metrics]
        line = f"step {step}/{self._num_steps}  {'  '.join(shown)}"
        self._journal.progress(step, self._num_steps, line)
        logger.info("%s", line)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record what held-out rows said after a step; 0 is before the first one."""
        self._heartbeat.tick()
        if metrics:
            self._journal.metrics(step, metrics)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
            self._journal.progress(step, self._num_steps, f"after step {step}: {shown}")

    def checkpoint_when_due(
        self,
        step: int,
        workers: WorkerGroup,
        *,
        values: Mapping[str, float] | None = None,
        last: bool = False,
    ) -> None:
        """Publish a step checkpoint every so often, and after the last step.

        Args:
            step: that was just done.
            workers: whose state is saved.
            values: what the loop itself keeps between steps.
            last: the loop ends here, before its full number of steps.
        """
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
        """Have the weights become their moving average, where there is one, and write them.

        What an attempt resumes from stays as it is: one that is killed here adopts it again.

        Args:
            workers: after the last step.
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
        """Wait for the checkpoint in flight, if there is one; raises what went wrong with it."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._newest = in_flight.result()

    def last_checkpoint(self) -> Path:
        """Files of the last step's checkpoint, or of its average, once the loop has ended."""
        with self.clock("save"):
            self._settle()
        if self._newest is None:
            raise RuntimeError("the loop ended without a checkpoint")
        return self._newest.path
