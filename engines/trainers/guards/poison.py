"""Updates whose loss or gradient is no finite number: left out, counted, named, limited.

Promises: such an update changes no weight, and is never left out in silence: the journal names
the rows that spoiled it and their tensors that are no finite numbers, as far as they can be told;
one more than the limit stops the run.
Does not promise to find a row where only the gradient overflowed: it says so then.
"""

from collections.abc import Callable, Sequence

import torch

from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.errors import NonFiniteError
from engines.training.roles import POLICY, RoleName
from engines.types import PoisonedUpdate, TokenBatch, TrainMetrics

ROW = "row"
"""Row of a batch that numbers its sequences for their names: (B,) int64."""

NUM_POISONED = "training/poisoned_updates"
_MAX_NUM_NAMED = 5


class PoisonGuard:
    """Stands between a spoiled update and the run.

    Args:
        workers: whose roles are trained.
        limit: how many may be left out.
        setting: names the limit, for error lines.
        say: writes a line into the journal.
    """

    def __init__(
        self, workers: WorkerGroup, limit: int, setting: str, say: Callable[[str], None]
    ) -> None:
        self._workers, self._limit, self._setting, self._say = workers, limit, setting, say

    def taken(
        self,
        update: TrainMetrics | PoisonedUpdate,
        batch: TokenBatch,
        name_of: Callable[[int], str],
        role: RoleName = POLICY,
        *,
        num_before: int,
    ) -> TrainMetrics | None:
        """The metrics of an optimizer step that was taken.

        Args:
            update: what came of it.
            batch: it was taken on, with the row `ROW`.
            name_of: what a row of that number is called.
            role: that was trained.
            num_before: updates that were left out before; a trainer keeps it in its checkpoints.

        Returns:
            None where it was left out.

        Raises:
            NonFiniteError: it is one more than may be left out.
        """
        if not isinstance(update, PoisonedUpdate):
            return update
        num_poisoned = num_before + 1
        numbers = batch.rows[ROW].tolist()
        rows = [
            f"{name_of(int(numbers[row]))} ({', '.join(tensors)})"
            for row, tensors in sorted(self._spoiled(batch, role).items())
        ]
        line = f"{role}: {update.reason}; the update is left out; {_described(rows)}"
        if num_poisoned > self._limit:
            raise NonFiniteError(
                f"{line}: {num_poisoned} updates, more than {self._setting} {self._limit}; "
                "look at these rows, lower the learning rate, or raise the limit"
            )
        self._say(line)
        return None

    def _spoiled(self, batch: TokenBatch, role: RoleName) -> dict[int, list[str]]:
        """By sequence, the columns and outputs of the model that are no finite numbers."""
        outputs = self._workers.run(ModelWorker.infer, batch, role=role)
        tensors = {"logprobs": outputs.logprobs_T, "values": outputs.values_T, **batch.columns}
        spoiled: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            finite = torch.isfinite(tensor.float())
            finite_T = finite if finite.dim() == 1 else finite.all(dim=1)
            for row in {*batch.sequence_index_T[~finite_T].tolist()}:
                spoiled.setdefault(row, []).append(name)
        return spoiled


def _described(rows: Sequence[str]) -> str:
    if not rows:
        return "every row is finite by itself, so a gradient overflowed"
    more = len(rows) - _MAX_NUM_NAMED
    return f"spoiled by {', '.join(rows[:_MAX_NUM_NAMED])}" + (f" and {more} more" * (more > 0))
