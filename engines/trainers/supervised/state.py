"""State of a supervised loop between two steps, as a step checkpoint keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.checkpoint.step_store import TrainerState
from engines.types import TrainMetrics
from infra.tracking.comparison import BEFORE

LOSS_AVERAGE = "loss_average"
LOSS_AVERAGE_DECAY = 0.9
_NUM_POISONED = "num_poisoned"


@dataclass(frozen=True)
class SupervisedState:
    """The loop after `step` steps.

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
        average = moving_average(self.loss_average, update.loss)
        return replace(self, step=self.step + 1, loss_average=average)


def moving_average(average: float | None, loss: float) -> float:
    """Return the exponential moving average with decay 0.9, starting at the first value."""
    if average is None:
        return loss
    return LOSS_AVERAGE_DECAY * average + (1 - LOSS_AVERAGE_DECAY) * loss
