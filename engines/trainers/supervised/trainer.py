"""The loop of training on given answers: SFT, reward models, preferences.

Promises: the rows of a step are a pure function of (seed, step), so a killed run continues from
its newest valid step checkpoint and ends bitwise where an uninterrupted one does; the loss of a
step is the mean over what it trains on, whatever the number of ranks or micro-batches. With a
`target_loss` the number of steps is decided by the training loss alone, and survives a kill too.
What held-out rows said before the first step survives it likewise. With `optimizer.ema` what is
committed, and looked at last, is the average of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engines.config.sections import SupervisedConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.order.training_order import Order, order_of
from engines.trainers.guards.poison import NUM_POISONED, PoisonGuard
from engines.trainers.loop.loop_step import LoopStep
from engines.trainers.loop.progress import StageProgress
from engines.trainers.supervised.state import SupervisedState
from engines.trainers.supervised.training_set import TrainingSet
from engines.types import TokenBatch, TrainMetrics
from infra.tracking.comparison import BEFORE


@dataclass(frozen=True)
class Trained:
    """What a supervised stage did.

    Attributes:
        num_steps: over all attempts.
        before: what held-out rows said before the first step, by metric.
        after: the same after the last one.
    """

    num_steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """Of the stage: what held-out rows said in the end, and as `before/*` at the start."""
        return {**self.after, **{BEFORE + name: value for name, value in self.before.items()}}


@dataclass(frozen=True)
class SupervisedStage:
    """Training one role on rows with answers, and its parts.

    Attributes:
        config: steps and limits.
        training_set: the rows, their batches, the loss.
        order: which rows each step takes.
        workers: ranks that hold the role, with its first weights loaded.
        guard: of the updates.
        progress: journal, step checkpoints and job clock.
    """

    config: SupervisedConfig
    training_set: TrainingSet
    order: Order
    workers: WorkerGroup
    guard: PoisonGuard
    progress: StageProgress

    @staticmethod
    def of(
        config: SupervisedConfig,
        training_set: TrainingSet,
        rows_per_step: int,
        workers: WorkerGroup,
        progress: StageProgress,
        seed: int,
        section: str,
    ) -> "SupervisedStage":
        """The stage of a configuration.

        Args:
            config: steps and limits.
            training_set: the rows, their batches, the loss.
            rows_per_step: of one optimizer step, over all ranks.
            workers: ranks that hold the role, with its first weights loaded.
            progress: journal, step checkpoints and job clock.
            seed: of the visiting order.
            section: of the recipe, for error lines.

        Returns:
            Its parts.
        """
        setting = f"{section}.max_num_poisoned_updates"
        guard = PoisonGuard(workers, config.max_num_poisoned_updates, setting, progress.say)
        rows, path = training_set.visited, f"{section}.order"
        order = order_of(config.order, rows, rows_per_step, seed, path=path)
        return SupervisedStage(config, training_set, order, workers, guard, progress)

    def resumed(self) -> SupervisedState:
        """The state of the newest valid step checkpoint, which the ranks load; or the first."""
        state = SupervisedState.saved(self.progress.resume(self.workers))
        return state if state.step else replace(state, before=self.measure(0))

    def is_last(self, state: SupervisedState) -> bool:
        """Whether the loop ends with this state: all steps are done, or the loss is low enough."""
        target, average = self.config.target_loss, state.loss_average
        reached = target is not None and average is not None and average <= target
        return reached or state.step >= self.config.num_steps

    def batch(self, step: LoopStep) -> TokenBatch:
        """The rows of a step, packed, with what only a model can say of them; phase `infer`."""
        batch = self.training_set.batch(self.order.batch(step.number - 1))
        with step.clock("infer"):
            return self.training_set.complete(batch, self.workers)

    def train(
        self, step: LoopStep, batch: TokenBatch, state: SupervisedState
    ) -> TrainMetrics | None:
        """One optimizer step.

        Args:
            step: phase `train`.
            batch: of the step.
            state: before it.

        Returns:
            None where it was left out.

        Raises:
            NonFiniteError: one more was left out than `max_num_poisoned_updates`.
        """
        rows = self.training_set
        with step.clock("train"):
            found = self.workers.run(ModelWorker.train, batch, rows.loss_fn, rows.role)
        return self.guard.taken(
            found, batch, rows.name_of, rows.role, num_before=state.num_poisoned
        )

    def record(self, step: LoopStep, update: TrainMetrics | None, state: SupervisedState) -> None:
        """Record a finished step.

        Args:
            step: that is done.
            update: its optimizer step; None where it was left out.
            state: after it.
        """
        metrics = {
            "training/global_step": float(step.number),
            "training/epoch": self.order.epoch(step.number),
            NUM_POISONED: float(state.num_poisoned),
            "timing_s/step": (step_s := step.clock.elapsed_s),
            **self.workers.run(ModelWorker.performance_metrics),
        }
        if update is not None:
            metrics |= {
                "train/loss": update.loss,
                "train/grad_norm": update.grad_norm,
                "train/lr": update.lr,
                "train/global_tokens": float(update.num_tokens),
                "perf/throughput": update.num_tokens / step_s / self.workers.world_size,
                **update.metrics,
            }
        self.progress.record(step.number, step.number, metrics, step.clock)

    def measure(self, step: int) -> Mapping[str, float]:
        """What held-out rows say after a step, recorded with it; 0 is before the first one."""
        with self.progress.clock("evaluate"):
            found = self.training_set.measure(self.workers)
        self.progress.measured(step, {f"val-core/{name}": each for name, each in found.items()})
        return found

    def checkpoint(self, state: SupervisedState) -> None:
        """Look at held-out rows and publish a step checkpoint, where either is due."""
        is_last, every = self.is_last(state), self.training_set.measures_every
        # After the last step held-out rows are looked at once, by the weights that stay.
        if every is not None and state.step % every == 0 and not is_last:
            self.measure(state.step)
        self.progress.checkpoint_when_due(
            state.step, self.workers, values=state.values, last=is_last
        )


def train_supervised(stage: SupervisedStage) -> Trained:
    """Every step that no step checkpoint holds yet, until the target loss is reached.

    Args:
        stage: its parts.

    Returns:
        What was done, over all attempts.

    Raises:
        NonFiniteError: more updates were left out than `max_num_poisoned_updates`.
    """
    state = stage.resumed()
    while not stage.is_last(state):
        step = LoopStep(state.step + 1, state.step + 1)
        update = stage.train(step, stage.batch(step), state)
        state = state.after(update)
        stage.record(step, update, state)
        stage.checkpoint(state)
    stage.progress.adopt_average(stage.workers)
    return Trained(state.step, state.before, stage.measure(state.step))
