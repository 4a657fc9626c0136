"""The training loop on given answers: SFT, reward models, preferences.

Promises: the rows of a step are a pure function of (seed, step), so a killed run resumes from its
newest valid step checkpoint with bitwise the same result; the loss is a mean over the whole step
for any number of ranks or micro-batches. With a `target_loss` the training loss alone may end the
stage early. With `optimizer.ema` the averaged weights are committed and measured last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.checkpoint.step_store import TrainerState
from engines.config.sections import SupervisedConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.order import order_of
from engines.trainers.nonfinite_guard import NUM_POISONED, PoisonGuard
from engines.trainers.progress import LoopStep, StageProgress
from engines.trainers.supervised.training_set import TrainingSet
from engines.types import TokenBatch, TrainMetrics
from infra.tracking.comparison import BEFORE

LOSS_AVERAGE = "loss_average"
LOSS_AVERAGE_DECAY = 0.9
_NUM_POISONED = "num_poisoned"


@dataclass(frozen=True)
class SupervisedState:
    """State of the training loop after `step` steps.

    `loss_average` is None before the first update; `num_poisoned` counts left-out updates; `before`
    holds the held-out metrics before the first step.
    """

    step: int = 0
    loss_average: float | None = None
    num_poisoned: int = 0
    before: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def saved(state: TrainerState) -> "SupervisedState":
        """Return the state of a checkpoint."""
        values = state.values
        return SupervisedState(
            step=state.step,
            loss_average=float(values[LOSS_AVERAGE]) if LOSS_AVERAGE in values else None,
            num_poisoned=int(values.get(_NUM_POISONED, 0)),
            before={
                name.removeprefix(BEFORE): float(value)
                for name, value in values.items()
                if name.startswith(BEFORE)
            },
        )

    @property
    def values(self) -> Mapping[str, int | float]:
        """Values of a step checkpoint besides the step."""
        values: dict[str, int | float] = {BEFORE + name: each for name, each in self.before.items()}
        if self.loss_average is not None:
            values[LOSS_AVERAGE] = self.loss_average
        return {**values, _NUM_POISONED: self.num_poisoned}

    def after(self, update: TrainMetrics | None) -> "SupervisedState":
        """Return the state after the next step; `update` is None if it was left out."""
        if update is None:
            return replace(self, step=self.step + 1, num_poisoned=self.num_poisoned + 1)
        return replace(
            self, step=self.step + 1, loss_average=moving_average(self.loss_average, update.loss)
        )


def moving_average(average: float | None, loss: float) -> float:
    """Return the exponential moving average with decay 0.9, starting at the first value."""
    if average is None:
        return loss
    return LOSS_AVERAGE_DECAY * average + (1 - LOSS_AVERAGE_DECAY) * loss


@dataclass(frozen=True)
class Trained:
    """Steps of a supervised stage over all attempts, and held-out metrics before and after."""

    num_steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, float]:
        """Final held-out metrics, and those of the start as `before/*`."""
        return {**self.after, **{BEFORE + name: value for name, value in self.before.items()}}


@dataclass
class SupervisedTrainer:
    """Trains a model on given answers.

    Attributes:
        rows_per_step: rows of one optimizer step, over all ranks.
        workers: ranks that hold the role of `training_set`, with its first weights loaded.
        section: name of the section `config`, for errors.
    """

    config: SupervisedConfig
    training_set: TrainingSet
    rows_per_step: int
    workers: WorkerGroup
    progress: StageProgress
    seed: int
    section: str

    def __post_init__(self) -> None:
        self._guard = PoisonGuard(
            self.workers,
            self.config.max_num_poisoned_updates,
            f"{self.section}.max_num_poisoned_updates",
            self.progress.journal.log,
        )
        self._order = order_of(
            self.config.order,
            self.training_set.visited,
            self.rows_per_step,
            self.seed,
            path=f"{self.section}.order",
        )

    def train(self) -> Trained:
        """Train the remaining steps, or until the target loss is reached.

        Raises:
            NonFiniteError: more than `max_num_poisoned_updates` were left out.
        """
        state, rows = SupervisedState.saved(self.progress.resume(self.workers)), self.training_set
        if not state.step:
            state = replace(state, before=self._measure(0))
        is_last = self._is_last(state)
        while not is_last:
            step = LoopStep(state.step + 1, state.step + 1)
            batch = self.batch(step)
            with step.clock("train"):
                found = self.workers.run(ModelWorker.train, batch, rows.loss_fn, rows.role)
            update = self._guard.taken(
                found, batch, rows.name_of, rows.role, num_before=state.num_poisoned
            )
            del batch, found  # else the driver holds two batches
            state = state.after(update)
            self._record(step, update, state)
            is_last, every = self._is_last(state), rows.measures_every
            # After the last step held-out rows are measured once, with the committed weights.
            if every is not None and state.step % every == 0 and not is_last:
                self._measure(state.step)
            self.progress.checkpoint_when_due(
                state.step, self.workers, values=state.values, last=is_last
            )
        self.progress.adopt_average(self.workers)
        return Trained(state.step, state.before, self._measure(state.step))

    def batch(self, step: LoopStep) -> TokenBatch:
        """Return the packed rows of a step, with the columns that need a model's inference."""
        batch = self.training_set.batch(self._order.batch(step.number - 1))
        with step.clock("infer"):
            return self.training_set.complete(batch, self.workers)

    def _is_last(self, state: SupervisedState) -> bool:
        """Return True if all steps are done or the target loss is reached."""
        target, average = self.config.target_loss, state.loss_average
        reached = target is not None and average is not None and average <= target
        return reached or state.step >= self.config.num_steps

    def _record(self, step: LoopStep, update: TrainMetrics | None, state: SupervisedState) -> None:
        """Record a finished step; `update` is None if left out, `state` is after the step."""
        metrics = {
            "training/global_step": float(step.number),
            "training/epoch": self._order.epoch(step.number),
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

    def _measure(self, step: int) -> Mapping[str, float]:
        """Return and record the held-out metrics after a step; step 0 is before the first one."""
        with self.progress.clock("evaluate"):
            found = self.training_set.measure(self.workers)
        self.progress.measured(step, {f"val-core/{name}": each for name, each in found.items()})
        return found
