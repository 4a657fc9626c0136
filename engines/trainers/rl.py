"""The RL training loop: one round, step by step.

Promises: everything random in a step is derived from (seed, round, step), so a killed round resumes
from its newest valid step checkpoint with bitwise the same result; a step without a usable sample
trains nothing and is counted. With `optimizer.ema` a round samples from the weights themselves and
commits their average.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engines.controller.worker_group import WorkerGroup
from engines.trainers.collector import Sampler
from engines.trainers.loop_state import LoopState
from engines.trainers.progress import LoopStep, StageProgress, TrainedSteps
from engines.trainers.recorder import Recorder
from engines.trainers.rollout_batch import Preparer
from engines.trainers.updater import RoundObjective, Updater


@dataclass(frozen=True)
class RLRound:
    """The parts of a round; `workers` hold the policy with the round's first weights."""

    num_steps: int
    start: LoopState
    workers: WorkerGroup
    sampler: Sampler
    preparer: Preparer
    objective: RoundObjective
    updater: Updater
    recorder: Recorder
    progress: StageProgress

    def resumed(self) -> LoopState:
        """Load the newest valid step checkpoint and return its state, or else the start state."""
        return self.start.continued(self.progress.resume(self.workers))

    def steps_after(self, state: LoopState) -> Iterator[LoopStep]:
        """Yield the remaining steps of the round."""
        for number in range(state.step + 1, self.num_steps + 1):
            yield LoopStep(number, state.num_previous_steps + number)

    def checkpoint(self, state: LoopState) -> None:
        """Publish a step checkpoint if one is due."""
        self.progress.checkpoint_when_due(state.step, self.workers, values=state.values)


def train_round(round: RLRound) -> TrainedSteps:
    """Train for one round, return counters for the next; `PipelineError` if a guard stops it."""
    state = round.resumed()
    with round.progress.clock("train"):
        round.sampler.publish(state.version)
    for step in round.steps_after(state):
        state = _train_step(round, step, state)
    round.progress.adopt_average(round.workers)
    return state.trained_steps(with_kl_coef=round.objective.has_kl_in_reward)


def _train_step(round: RLRound, step: LoopStep, state: LoopState) -> LoopState:
    """Train one step; a separate function, so that its batch is freed before the next step."""
    collected = round.sampler.take(step, state.version)
    batch = round.preparer.fill(step, collected.experience())
    batch = round.objective.advantages(step, batch, state)
    round.recorder.keep(step, collected, batch)
    updates = round.updater.train(step, batch, state)
    kl_coef = round.objective.next_kl_coef(batch, state)
    state = state.after(updates, trains=batch.trains, kl_coef=kl_coef)
    num_sync_bytes = round.sampler.publish(state.version, step)
    round.recorder.record(step, collected, batch, updates, state, num_sync_bytes)
    round.checkpoint(state)
    return state
