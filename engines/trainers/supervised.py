"""The loop of supervised fine-tuning.

Promises: the rows of a step are a pure function of (seed, step), so a killed run continues from
its newest valid step checkpoint and ends bitwise where an uninterrupted one does; the loss of a
step is the mean over its trained tokens, whatever the number of ranks or micro-batches. With a
`target_loss` the number of steps is decided by the training loss alone, and survives a kill too.
"""

import torch

from engines.algorithms.supervised import sft_loss_fn
from engines.config.stages import SFTConfig
from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.read.examples import SFTExamples
from engines.data.read.order import ResumableOrder
from engines.trainers.guards.poison import NUM_POISONED, ROW, PoisonGuard
from engines.trainers.phases import PhaseClock
from engines.trainers.progress import StageProgress
from engines.types import TokenBatch

LOSS_AVERAGE = "loss_average"
LOSS_AVERAGE_DECAY = 0.9
_NUM_POISONED = "num_poisoned"


class SupervisedTrainer:
    """Trains a policy on conversations.

    Args:
        config: steps and batch size.
        workers: ranks that hold the policy, with its first weights loaded.
        examples: the tokenized supervised split.
        progress: journal, step checkpoints and job clock.
        seed: of the visiting order.
    """

    def __init__(
        self,
        config: SFTConfig,
        workers: WorkerGroup,
        examples: SFTExamples,
        progress: StageProgress,
        seed: int,
    ) -> None:
        self._config, self._workers = config, workers
        self._examples, self._rows = examples.examples, examples.indices
        self._progress = progress
        self._loss_fn = sft_loss_fn()
        self._guard = PoisonGuard(
            workers, config.max_num_poisoned_updates, "sft.max_num_poisoned_updates", progress.say
        )
        self._order = ResumableOrder(
            num_rows=len(self._examples), batch_size=config.batch_size_sequences, seed=seed
        )

    def run(self) -> int:
        """Every step that no step checkpoint holds yet, until the target loss is reached.

        Returns:
            The steps done, over all attempts.
        """
        state = self._progress.resume(self._workers)
        done = state.step
        average = float(state.values[LOSS_AVERAGE]) if LOSS_AVERAGE in state.values else None
        self._guard.num_poisoned = int(state.values.get(_NUM_POISONED, 0))
        while done < self._config.num_steps and not self._reached_target(average):
            done += 1
            loss = self.step(done)
            average = average if loss is None else moving_average(average, loss)
            values: dict[str, float] = {_NUM_POISONED: self._guard.num_poisoned}
            if average is not None:
                values[LOSS_AVERAGE] = average
            self._progress.checkpoint_when_due(
                done, self._workers, values=values, last=self._reached_target(average)
            )
        return done

    def step(self, step: int) -> float | None:
        """One optimizer step.

        Args:
            step: 1-based.

        Returns:
            Its loss; None where it was left out since that is no finite number.

        Raises:
            NonFiniteError: one more was left out than `sft.max_num_poisoned_updates`.
        """
        clock = PhaseClock()
        batch = self.batch(step)
        with clock("train"):
            found = self._workers.run(ModelWorker.train, batch, self._loss_fn)
        update = self._guard.taken(found, batch, self._name_of)
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
            }
        self._progress.record(step, step, metrics, clock)
        return None if update is None else update.loss

    def _name_of(self, example: int) -> str:
        return f"row {self._rows[example]} of data.sft"

    def _reached_target(self, average: float | None) -> bool:
        target = self._config.target_loss
        return target is not None and average is not None and average <= target

    def batch(self, step: int) -> TokenBatch:
        """The packed conversations of a step; 1-based."""
        rows = list(self._order.batch(step - 1))
        chosen = [self._examples[row] for row in rows]
        batch = TokenBatch.from_sequences(
            [example.input_ids for example in chosen],
            loss_mask=[example.loss_mask for example in chosen],
        )
        return batch.with_rows(**{ROW: torch.tensor(rows, dtype=torch.int64)})


def moving_average(average: float | None, loss: float) -> float:
    """Exponential moving average with decay 0.9; the first value stands for those before it."""
    if average is None:
        return loss
    return LOSS_AVERAGE_DECAY * average + (1 - LOSS_AVERAGE_DECAY) * loss
