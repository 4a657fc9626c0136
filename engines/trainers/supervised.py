"""The loop of supervised fine-tuning.

Promises: the rows of a step are a pure function of (seed, step), so a killed run continues from
its newest valid step checkpoint and ends bitwise where an uninterrupted one does; the loss of a
step is the mean over its trained tokens, whatever the number of ranks or micro-batches. With a
`target_loss` the number of steps is decided by the training loss alone, and survives a kill too.
"""

from engines.algorithms.supervised import sft_loss_fn
from engines.config.stages import SFTConfig
from engines.controller.policy_worker import PolicyWorker
from engines.controller.worker_group import WorkerGroup
from engines.data.read.examples import SFTExamples
from engines.data.read.order import ResumableOrder
from engines.trainers.phases import PhaseClock
from engines.trainers.progress import StageProgress
from engines.types import TokenBatch

LOSS_AVERAGE = "loss_average"
LOSS_AVERAGE_DECAY = 0.9


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
        self._examples, self._progress = examples.examples, progress
        self._loss_fn = sft_loss_fn()
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
        while done < self._config.num_steps and not self._reached_target(average):
            done += 1
            average = moving_average(average, self.step(done))
            self._progress.checkpoint_when_due(
                done,
                self._workers,
                values={LOSS_AVERAGE: average},
                last=self._reached_target(average),
            )
        return done

    def step(self, step: int) -> float:
        """One optimizer step.

        Args:
            step: 1-based.

        Returns:
            Its loss.
        """
        clock = PhaseClock()
        with clock("train"):
            update = self._workers.run(
                PolicyWorker.train_mini_batch, self.batch(step), self._loss_fn
            )
        step_s = clock.elapsed_s
        metrics = {
            "train/loss": update.loss,
            "train/grad_norm": update.grad_norm,
            "train/lr": update.lr,
            "train/global_tokens": float(update.num_tokens),
            "training/global_step": float(step),
            "training/epoch": self._order.epoch(step),
            "timing_s/step": step_s,
            "perf/throughput": update.num_tokens / step_s / self._workers.world_size,
            **self._workers.run(PolicyWorker.performance_metrics),
        }
        self._progress.record(step, step, metrics, clock)
        return update.loss

    def _reached_target(self, average: float | None) -> bool:
        target = self._config.target_loss
        return target is not None and average is not None and average <= target

    def batch(self, step: int) -> TokenBatch:
        """The packed conversations of a step; 1-based."""
        chosen = [self._examples[index] for index in self._order.batch(step - 1)]
        return TokenBatch.from_sequences(
            [example.input_ids for example in chosen],
            loss_mask=[example.loss_mask for example in chosen],
        )


def moving_average(average: float | None, loss: float) -> float:
    """Exponential moving average with decay 0.9; the first value stands for those before it."""
    if average is None:
        return loss
    return LOSS_AVERAGE_DECAY * average + (1 - LOSS_AVERAGE_DECAY) * loss
