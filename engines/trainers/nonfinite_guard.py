"""Leave out updates with a non-finite loss or gradient.

Promises: such an update changes no weight, is counted, and is limited in number. The journal names
up to five rows with tensors that are not finite, or says that only the gradient overflowed.
"""

from collections.abc import Callable

import torch

from engines.controller.model_worker import ModelWorker
from engines.controller.worker_group import WorkerGroup
from engines.errors import NonFiniteError
from engines.training.spec import POLICY, RoleName
from engines.types import PoisonedUpdate, TokenBatch, TrainMetrics

ROW = "row"
"""Name of the batch row, (B,) int64, with each sequence's number, for `name_of`."""

NUM_POISONED = "training/poisoned_updates"
_MAX_NUM_NAMED = 5


class PoisonGuard:
    """Leaves out non-finite updates, at most `limit`; `setting` names the limit in errors."""

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
        """Return the metrics of an update of a batch with row `ROW`, or None if it was left out.

        `name_of` names a row by its number. `num_before` updates were left out before; the trainer
        keeps that count in checkpoints. Raises `NonFiniteError` above the limit.
        """
        if not isinstance(update, PoisonedUpdate):
            return update
        numbers = batch.rows[ROW].tolist()
        rows = [
            f"{name_of(int(numbers[row]))} ({', '.join(tensors)})"
            for row, tensors in sorted(self._spoiled(batch, role).items())
        ]
        cause = f"spoiled by {', '.join(rows[:_MAX_NUM_NAMED])}"
        if len(rows) > _MAX_NUM_NAMED:
            cause += f" and {len(rows) - _MAX_NUM_NAMED} more"
        elif not rows:
            cause = "every row is finite by itself, so a gradient overflowed"
        line = f"{role}: {update.reason}; the update is left out; {cause}"
        if num_before >= self._limit:
            raise NonFiniteError(
                f"{line}: {num_before + 1} updates, more than {self._setting} {self._limit}; "
                "look at these rows, lower the learning rate, or raise the limit"
            )
        self._say(line)
        return None

    def _spoiled(self, batch: TokenBatch, role: RoleName) -> dict[int, list[str]]:
        """Return the columns and model outputs that are not finite, by sequence."""
        outputs = self._workers.run(ModelWorker.infer, batch, role=role)
        tensors = {"logprobs": outputs.logprobs_T, "values": outputs.values_T, **batch.columns}
        spoiled: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            if tensor is not None:
                finite = torch.isfinite(tensor.float())
                finite_T = finite if finite.dim() == 1 else finite.all(dim=1)
                for row in {*batch.sequence_index_T[~finite_T].tolist()}:
                    spoiled.setdefault(row, []).append(name)
        return spoiled
