"""What a supervised stage trains on: rows, the batches made of them, and the loss.

A stage of its own is such a class, its job and its section; the loop,
`engines.trainers.supervised.trainer`, knows no more of it than this.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engines.algorithms.supervised import sft_loss_fn
from engines.controller.worker_group import WorkerGroup
from engines.data.order.training_order import VisitedRow
from engines.data.read.by_place import Made
from engines.data.read.examples import SFTExamples
from engines.trainers.guards.poison import ROW
from engines.training.roles import POLICY, RoleName
from engines.training.spec import LossFn
from engines.types import TokenBatch


class TrainingSet(Protocol):
    """Rows with answers, and how a model learns from them."""

    @property
    def role(self) -> RoleName:
        """The role that is trained."""
        ...

    @property
    def loss_fn(self) -> LossFn:
        """See `LossFn`."""
        ...

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """The rows as an order sees them, at least one."""
        ...

    @property
    def largest_unit(self) -> int:
        """Tokens of the most that one micro-batch has to hold, held-out rows included."""
        ...

    @property
    def measures_every(self) -> int | None:
        """Steps between two `measure`, beside those before the first and after the last step."""
        ...

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """Some rows, packed.

        Args:
            rows: their places, in [0, number of rows).

        Returns:
            On the CPU, with the column `loss_mask` and the row `guards.poison.ROW`.
        """
        ...

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:
        """What only a model can say of a batch.

        Args:
            batch: of `batch`.
            workers: that hold the roles, as they are before the update.

        Returns:
            With the columns and rows that the loss reads.
        """
        ...

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:
        """Look at held-out rows.

        Args:
            workers: that hold the role.

        Returns:
            Metrics by name; none where no rows are held out.
        """
        ...

    def name_of(self, row: int) -> str:
        """What a row is called in an error."""
        ...


class Conversations:
    """Conversations to imitate.

    Args:
        examples: the tokenized supervised split.
    """

    role: RoleName = POLICY
    measures_every = None

    def __init__(self, examples: SFTExamples) -> None:
        self._examples, self._rows = examples.examples, examples.indices
        self._sources, self._lengths = examples.data_sources, examples.lengths
        self.loss_fn: LossFn = sft_loss_fn()

    @property
    def visited(self) -> Sequence[VisitedRow]:
        """Conversations."""
        sources, lengths = self._sources, self._lengths
        return Made(
            range(len(lengths)), lambda place: VisitedRow(sources[place], lengths[place], {})
        )

    @property
    def largest_unit(self) -> int:
        """The longest conversation."""
        return max(self._lengths)

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """See `TrainingSet.batch`."""
        chosen = [self._examples[row] for row in rows]
        batch = TokenBatch.from_sequences(
            [example.input_ids for example in chosen],
            loss_mask=[example.loss_mask for example in chosen],
        )
        return batch.with_rows(**{ROW: torch.tensor(rows, dtype=torch.int64)})

    def complete(self, batch: TokenBatch, workers: WorkerGroup) -> TokenBatch:  # noqa: ARG002
        """Nothing is missing."""
        return batch

    def measure(self, workers: WorkerGroup) -> Mapping[str, float]:  # noqa: ARG002
        """Nothing is held out: an evaluation is a stage of its own."""
        return {}

    def name_of(self, row: int) -> str:
        """By its number in the data."""
        return f"row {self._rows[row]} of data.sft"
