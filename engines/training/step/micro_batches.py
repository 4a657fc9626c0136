"""Cuts one rank's batch into micro-batches under a token budget.

Deterministic; only a single unit (sequences that stay together) may exceed the budget. Sequences
are sorted by length, which makes packed attention cheap. The smallest number of micro-batches is
not guaranteed.

Sums of one optimizer step: denominators before it, losses and metrics after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engines import collectives
from engines.training.step.balance import balanced_partition, fewest_parts
from engines.types import LossOutput, TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch that goes through the model at once.

    Attributes:
        token_index_T: int64 places of its tokens in the whole batch; None for a filler, whose
            outputs are dropped.
    """

    batch: TokenBatch
    token_index_T: Tensor | None


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    min_num: int = 1,
    *,
    costs: Sequence[float] | None = None,
    units: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Assign sequences to micro-batches of nearly equal cost.

    Args:
        min_num: minimum number of micro-batches, as far as there are sequences.
        costs: of each sequence in any unit; None balances tokens.
        units: sequences that stay together; None: each is its own unit.

    Returns:
        For each micro-batch its sequence indices, shortest sequence first; micro-batches by
        ascending cost, so that ranks run similar ones together.
    """
    if not lengths:
        return []
    costs = lengths if costs is None else costs
    units = [[i] for i in range(len(lengths))] if units is None else units
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    unit_costs = [sum(costs[i] for i in unit) for unit in units]
    num = min(max(min_num, fewest_parts(sizes, max_tokens)), len(units))
    of_units = balanced_partition(unit_costs, num, sizes=sizes, max_size=max_tokens)
    parts = [sorted(i for unit in part for i in units[unit]) for part in of_units]
    parts.sort(key=lambda part: (math.fsum(costs[i] for i in part), part))
    return [sorted(part, key=lambda i: (lengths[i], i)) for part in parts]


def cut(batch: TokenBatch, plan: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Return the micro-batches of a plan."""
    return [_take(batch, sequences) for sequences in plan]


def filler(batch: TokenBatch) -> MicroBatch:
    """Return a micro-batch that trains on nothing: the shortest unit with a zero loss mask.

    Ranks have to run equally many micro-batches because each involves collectives; a rank with too
    few sequences runs fillers.
    """
    return MicroBatch(untrained(batch.select(shortest_unit(batch))), None)


def shortest_unit(batch: TokenBatch) -> list[int]:
    """Return the sequences of the unit with the fewest tokens."""
    lengths = batch.lengths_B.tolist()
    return min(batch.units, key=lambda unit: sum(lengths[i] for i in unit))


def untrained(batch: TokenBatch) -> TokenBatch:
    """Return the same batch with its loss mask at 0."""
    mask = torch.zeros(batch.num_tokens, dtype=torch.float32, device=batch.input_ids_T.device)
    return batch.with_columns(loss_mask=mask)


def _take(batch: TokenBatch, sequences: Sequence[int]) -> MicroBatch:
    if list(sequences) == list(range(batch.num_sequences)):
        device = batch.input_ids_T.device
        return MicroBatch(batch, torch.arange(batch.num_tokens, device=device))
    return MicroBatch(batch.select(sequences), batch.token_index_T(sequences))


def loss_counts(batch: TokenBatch) -> tuple[int, int, int]:
    """Return the numbers of trained tokens, and of sequences and units that have one."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return 0, 0, 0
    on_T = mask_T != 0
    cumulative = torch.cat([torch.zeros(1, dtype=torch.int64), on_T.cumsum(0).cpu()])
    per_sequence_B = cumulative[batch.cu_seqlens.to(torch.int64).cpu()].diff()
    trained_B = per_sequence_B > 0
    num_sequences = int(trained_B.sum())
    if batch.unit_B is None:
        return int(cumulative[-1]), num_sequences, num_sequences
    num_units = batch.unit_B.cpu()[trained_B].unique().numel()
    return int(cumulative[-1]), num_sequences, num_units


def trained_first_token(batch: TokenBatch) -> int:
    """Return the first sequence whose first token, which has no prediction, is trained, or -1."""
    mask_T = batch.columns.get("loss_mask")
    if mask_T is None:
        return -1
    starts_B = batch.cu_seqlens[:-1].to(torch.int64).clamp(max=max(batch.num_tokens - 1, 0))
    wrong_N = ((mask_T[starts_B] != 0) & (batch.lengths_B > 0)).nonzero()
    return int(wrong_N[0]) if len(wrong_N) else -1


class Totals:
    """Sums and maxima over micro-batches, kept on the device until one exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, output: LossOutput) -> None:
        """Add one micro-batch."""
        self._loss += output.loss.detach()
        for name, value in output.metrics.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            value = value.detach().double()
            seen = self._maxima.get(name)
            self._maxima[name] = value if seen is None else torch.maximum(seen, value)

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[float, dict[str, float], list[int]]:
        """Return the loss, the metrics, and the group ranks whose own loss is not finite."""
        sum_names, max_names = sorted(self._sums), sorted(self._maxima)
        values = [
            self._loss,
            *(self._sums[name] for name in sum_names),
            *(self._maxima[name] for name in max_names),
        ]
        rows = collectives.gather_rows(torch.stack(values), self._device, group)
        split = 1 + len(sum_names)
        loss, *sums = collectives.column_sums([row[:split] for row in rows])
        maxima = collectives.column_maxima([row[split:] for row in rows])
        spoiled = [place for place, row in enumerate(rows) if not math.isfinite(row[0])]
        return loss, dict(zip([*sum_names, *max_names], [*sums, *maxima], strict=True)), spoiled
