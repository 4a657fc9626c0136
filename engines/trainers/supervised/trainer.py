"""The loop of training on given answers: SFT, reward models, preferences.

Promises: the rows of a step are a pure function of (seed, step), so a killed run continues from
its newest valid step checkpoint and ends bitwise where an uninterrupted one does; the loss of a
step is the mean over what it trains on, whatever the number of ranks or micro-batches. With a
`target_loss` the number of steps is decided by the training loss alone, and survives a kill too.
What held-out rows said before the first step survives it likewise. With `optimizer.ema` what is
committed, and looked at last, is the average of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engines.config.sections import SupervisedConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.order.training_order import order_of
from engines.trainers.guards.poison import NUM_POISONED, PoisonGuard
from engines.trainers.phases import PhaseClock
from engines.trainers.progress import StageProgress
from engines.trainers.supervised.training_set import TrainingSet
from engines.types import TokenBatch
from infra.tracking.comparison import BEFORE

LOSS_AVERAGE = "loss_average"
LOSS_AVERAGE_DECAY = 0.9
_NUM_POISONED = "num_poisoned"


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


class SupervisedTrainer:
    """Trains one role on rows with answers.

    Args:
        config: steps and limits.
        training_set: the rows, their batches, the loss.
        rows_per_step: of one optimizer step, over all ranks.
        workers: ranks that hold the role, with its first weights loaded.
        progress: journal, step checkpoints and job clock.
        seed: of the visiting order.
        section: of the recipe, for error lines.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        training_set: TrainingSet,
        rows_per_step: int,
        workers: WorkerGroup,
        progress: StageProgress,
        seed: int,
        section: str,
    ) -> None:
        self._config, self._set, self._workers = config, training_set, workers
        self._progress = progress
        self._before: Mapping[str, float] = {}
        self._guard = PoisonGuard(
            workers,
            config.max_num_poisoned_updates,
            f"{section}.max_num_poisoned_updates",
            progress.say,
        )
        self._order = order_of(
            config.order, training_set.visited, rows_per_step, seed, path=f"{section}.order"
        )

    def run(self) -> Trained:
        """Every step that no step checkpoint holds yet, until the target loss is reached.

        Returns:
            What was done, over all attempts.
        """
        state = self._progress.resume(self._workers)
        done = state.step
        average = float(state.values[LOSS_AVERAGE]) if LOSS_AVERAGE in state.values else None
        self._guard.num_poisoned = int(state.values.get(_NUM_POISONED, 0))
        self._before = {
            name.removeprefix(BEFORE): float(value)
            for name, value in state.values.items()
            if name.startswith(BEFORE)
        }
        if done == 0:
            self._before = self._measured(0)
        while done < self._config.num_steps and not self._reached_target(average):
            done += 1
            loss = self.step(done)
            average = average if loss is None else moving_average(average, loss)
            last = done == self._config.num_steps or self._reached_target(average)
            every = self._set.measures_every
            # After the last step held-out rows are looked at once, by the weights that stay.
            if every is not None and done % every == 0 and not last:
                self._measured(done)
            self._progress.checkpoint_when_due(
                done, self._workers, values=self._kept(average), last=last
            )
        self._progress.adopt_average(self._workers)
        return Trained(done, self._before, self._measured(done))

    def _kept(self, average: float | None) -> dict[str, float]:
        """What a step checkpoint holds of the loop."""
        values = {BEFORE + name: value for name, value in self._before.items()}
        if average is not None:
            values[LOSS_AVERAGE] = average
        return {**values, _NUM_POISONED: self._guard.num_poisoned}

    def _measured(self, step: int) -> Mapping[str, float]:
        """What held-out rows say after a step, recorded with it."""
        with self._progress.clock("evaluate"):
            found = self._set.measure(self._workers)
        self._progress.measured(step, {f"val-core/{name}": each for name, each in found.items()})
        return found

    def step(self, step: int) -> float | None:
        """One optimizer step.

        Args:
            step: 1-based.

        Returns:
            Its loss; None where it was left out since that is no finite number.

        Raises:
            NonFiniteError: one more was left out than `max_num_poisoned_updates`.
        """
        clock = PhaseClock()
        batch = self.batch(step)
        with clock("infer"):
            batch = self._set.complete(batch, self._workers)
        with clock("train"):
            found = self._workers.run(ModelWorker.train, batch, self._set.loss_fn, self._set.role)
        update = self._guard.taken(found, batch, self._set.name_of, self._set.role)
        metrics = {
            "training/global_step": float(step),
            "training/epoch": self._order.epoch(step),
            NUM_POISONED: float(self._guard.num_poisoned),
            "timing_s/step": (step_s := clock.elapsed_s),
            **self._workers.run(ModelWorker.performance_metrics),
        }
        if update is not None:
            metrics |= {
                "train/loss": update.loss,
                "train/grad_norm": update.grad_norm,
                "train/lr": update.lr,
                "train/global_tokens": float(update.num_tokens),
                "perf/throughput": update.num_tokens / step_s / self._workers.world_size,
                **update.metrics,
            }
        self._progress.record(step, step, metrics, clock)
        return None if update is None else update.loss

    def _reached_target(self, average: float | None) -> bool:
        target = self._config.target_loss
        return target is not None and average is not None and average <= target

    def batch(self, step: int) -> TokenBatch:
        """The packed rows of a step; 1-based."""
        return self._set.batch(self._order.batch(step - 1))


def moving_average(average: float | None, loss: float) -> float:
    """Exponential moving average with decay 0.9; the first value stands for those before it."""
    if average is None:
        return loss
    return LOSS_AVERAGE_DECAY * average + (1 - LOSS_AVERAGE_DECAY) * loss
