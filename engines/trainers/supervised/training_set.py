"""The training set of a supervised stage: rows, their batches and the loss.

A new kind of rows needs a subclass; the loop uses this interface only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.controller.worker_group import WorkerGroup
from engines.data.order import VisitedRow
from engines.data.read.examples import SFTExamples
from engines.data.read.lazy_sequence import Made
from engines.trainers.nonfinite_guard import ROW
from engines.training.spec import POLICY, LossFn, RoleName
from engines.types import TokenBatch


class TrainingSet(ABC):
    """Rows with answers, their batches, and the loss with which a role is trained on them."""

    role: RoleName = POLICY
    """The role that is trained."""
    loss_fn: LossFn
    measures_every: int | None = None
    """Steps between calls of `measure`; None measures only before and after training."""

    @property
    @abstractmethod
    def visited(self) -> Sequence[VisitedRow]:
        """The rows (at least one) in the form that an order reads."""

    @property
    @abstractmethod
    def largest_unit(self) -> int:
        """Tokens of the largest unit of a micro-batch, held-out rows included."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """Pack rows, given by index, on the CPU with the column `loss_mask` and the row `ROW`."""

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:  # noqa: ARG002
        """Add the columns and rows of the loss that need inference before the update, if any."""
        return batch

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:  # noqa: ARG002
        """Return held-out metrics; empty if no rows are held out."""
        return {}

    @abstractmethod
    def name_of(self, row: int) -> str:
        """Return the name of a row for errors."""


class Conversations(TrainingSet):
    """Conversations for SFT, trained on their marked tokens; evaluation is a separate stage."""

    def __init__(self, examples: SFTExamples) -> None:
        self._examples, self._lengths = examples.examples, examples.lengths
        self._sources = examples.data_sources
        self.loss_fn: LossFn = SupervisedLoss()

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """One row per conversation."""
        return Made(
            range(len(self._lengths)),
            lambda place: VisitedRow(self._sources[place], self._lengths[place], {}),
        )

    @property
    def largest_unit(self) -> int:
        """Tokens of the longest conversation."""
        return max(self._lengths)

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """See `TrainingSet.batch`."""
        chosen = [self._examples[row] for row in rows]
        return TokenBatch.from_sequences(
            [example.input_ids for example in chosen],
            loss_mask=[example.loss_mask for example in chosen],
        ).with_rows(**{ROW: torch.tensor(rows, dtype=torch.int64)})

    def name_of(self, row: int) -> str:
        """Return the row's number in the data."""
        return f"row {row} of data.sft"
